"""Reports of runs, made from their folders: figures, a page to look at, a trace for Perfetto."""
