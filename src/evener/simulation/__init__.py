"""What a team would do: its planner and its data position under virtual time."""
