"""Loaders: what a rank of each kind of team is handed, and in which order."""
