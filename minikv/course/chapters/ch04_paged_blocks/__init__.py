"""Chapter 04."""
