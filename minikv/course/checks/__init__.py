"""What each exercise's solution must do: one module of checks a chapter."""
