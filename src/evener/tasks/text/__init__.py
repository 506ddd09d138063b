"""The text of a language model run: reading, tokenising into a memory-mapped file, packing."""
