"""How long tests wait for what should come: so long that only a hang can take longer."""

PATIENCE_S = 120.0
"""For one answer, such as the end of a process that imports torch: seconds on a quiet machine, but
others may use the same cores, and there are slower ones. pytest's own limit for a whole test
(pyproject.toml) is longer, so that the wait that failed can say for what."""
