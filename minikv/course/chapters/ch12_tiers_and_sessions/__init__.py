"""Chapter 12: what does not fit goes one tier down, and a conversation outlives its process."""
