"""Keys, executables and the cache that keeps them: from a region to what can be called."""
