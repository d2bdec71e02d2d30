"""Times every workload plain and fused, side by side in one process: `python -m benchmarks --list`."""
