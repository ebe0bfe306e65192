"""Chapter 17."""
