"""The options of training, YAML and the command line: keys, defaults, limits. No torch here."""
