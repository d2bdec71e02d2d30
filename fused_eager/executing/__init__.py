"""Regions are run, through XLA and ATen, whichever is faster, and values get to where they belong."""
