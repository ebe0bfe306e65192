"""What a result looks like: in a terminal, in a notebook, as a page, as a diff."""
