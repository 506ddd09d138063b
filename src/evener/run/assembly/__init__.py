"""Puts a rank's parts together from what the user gave, and keeps their state."""
