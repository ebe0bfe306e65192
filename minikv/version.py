"""The course's version: it is part of the names of stored blocks and of session files."""

__version__ = "0.1.0"
