"""What only a GPU needs. The core imports nothing of it before a model on a GPU is there."""
