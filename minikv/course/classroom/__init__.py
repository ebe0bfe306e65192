"""The course in a class: assignments for nbgrader."""
