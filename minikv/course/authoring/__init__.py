"""For those who write the course: a new chapter, pictures for the README, the bundled model."""
