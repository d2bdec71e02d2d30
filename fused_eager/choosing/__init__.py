"""Which way ops go, fused or torch alone: what was measured for each stretch and each turn of a loop."""
