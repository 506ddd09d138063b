"""What each rank is handed out: training data by plan, streams, evaluations."""
