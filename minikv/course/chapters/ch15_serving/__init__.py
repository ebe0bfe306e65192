"""Chapter 15."""
