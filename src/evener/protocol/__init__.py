"""The state machines of a window and of an elastic team, and the rows that ranks exchange. Pure."""
