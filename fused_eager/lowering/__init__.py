"""A region as one JAX function, and what computes the same faster."""
