"""Chapter 14."""
