"""The front door: contexts, the mode, and the calls that no dispatcher sees."""
