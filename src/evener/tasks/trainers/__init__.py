"""Objects that train a language model batch by batch, where the caller owns the loop and data."""
