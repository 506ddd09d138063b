"""Simulate a team: its planner and its data position in virtual time."""
