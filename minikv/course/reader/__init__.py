"""What belongs to one reader: files, progress, predictions, parts, the panel, updates."""
