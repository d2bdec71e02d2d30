"""What a compiled follower would bring: a prototype in C++ and its measurement, `python -m benchmarks.follower`.

No part of the library uses it. The question, the figures and the answer are in docs/compiled_follower.md.
"""
