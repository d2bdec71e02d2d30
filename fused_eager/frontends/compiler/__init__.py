"""The compiler door: `torch.compile(model, backend="fused_eager")`. A graph of ATen calls becomes a stream, is planned,
keyed, compiled, cached and run as any other; and `export`, which writes such a graph down for JAX."""
