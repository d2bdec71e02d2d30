"""PyTorch's own tests inside a context: which of those that pass without the library do not pass with it."""
