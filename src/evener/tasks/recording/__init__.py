"""What a run tells while it goes on and at its end: events, checkpoints, figures, the verdict."""
