"""Chapter 10: keys and values in 8 and 4 bits."""
