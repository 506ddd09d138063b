"""What a run folder tells afterwards: figures, a page to look at, a trace for Perfetto."""
