"""Reports of runs, made from their folders: figures, an HTML page, a trace for Perfetto."""
