"""How the course draws: the style, players, and what several chapters show."""
