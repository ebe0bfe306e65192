"""Chapter 09."""
