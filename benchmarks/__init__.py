"""Times every workload plain and fused, side by side in one process: `python -m benchmarks --list`.

`python -m benchmarks --programs` does the same for many small everyday programs, unlike each other.
`python -m benchmarks --check` (`make check-speed`, part of CI) holds a few quick ones to bounds on their ratios.
"""
