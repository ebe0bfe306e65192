"""What an exercise is: its manifest and skeleton, the reader's file, what readers do wrong."""
