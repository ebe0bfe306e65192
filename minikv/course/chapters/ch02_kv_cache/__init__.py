"""Chapter 02."""
