"""Chapter 00."""
