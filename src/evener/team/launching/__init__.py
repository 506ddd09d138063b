"""Starts the ranks of a host, watches over them, and ends them together."""
