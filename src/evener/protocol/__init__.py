"""What ranks tell one another in a window, and what follows from it. Pure."""
