"""Events of a run, and the sinks that store or show them."""
