"""The reference of what exercises ask for and the engine has no use for: one module a chapter."""
