"""Which way ops go: whether a stream is worth compiling, and what was measured, fused and torch alone, for each segment
and each turn of a loop."""
