"""Chapter 11: one buffer of cells, and a text without end."""
