"""The text of a language model run: read, tokenised into a memory-mapped file, packed."""
