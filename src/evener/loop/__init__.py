"""The loop that users write: assembled, run, reported, saved and resumed."""
