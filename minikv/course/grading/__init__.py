"""The course in a class: marks for many students, and assignments for nbgrader."""
