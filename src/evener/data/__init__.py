"""Which samples a rank reads, each exactly once, and how they are fetched ahead of need."""
