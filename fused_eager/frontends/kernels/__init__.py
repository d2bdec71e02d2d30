"""The kernels door: one op whose lowering the user wrote in JAX (`jax_op`) or in Pallas (`pallas_op`).

A decorated function becomes a torch op. Recorded, it is a node like any other, lowered by the function itself.
"""
