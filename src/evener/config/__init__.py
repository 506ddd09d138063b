"""What people may say in YAML and on the command line: keys, defaults, limits. No torch here."""
