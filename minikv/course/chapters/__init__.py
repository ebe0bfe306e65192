"""The manifest: one module a chapter. Which functions belong to which exercise, with its texts."""
