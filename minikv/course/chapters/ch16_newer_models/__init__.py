"""Chapter 16."""
