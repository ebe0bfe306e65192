"""How exercises are made, run, judged and told."""
