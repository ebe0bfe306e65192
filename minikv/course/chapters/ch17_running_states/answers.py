"""Chapter 17: references of exercises that the engine does not have."""
