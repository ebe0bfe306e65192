"""Chapter 08."""
