"""Objects that train a language model batch by batch; the caller owns the loop and the data."""
