"""Right and wrong solutions of the exercises, one module a chapter."""
