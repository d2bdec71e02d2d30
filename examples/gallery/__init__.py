"""Ten programs with one typical mistake each, marked `# <-`. The report's first advice names that line and its cure.

    python -m fused_eager run --report examples/gallery/sync_per_step.py

They are plain PyTorch and know nothing of the library.
"""
