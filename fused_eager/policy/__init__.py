"""Who runs ops: XLA, in regions of what was recorded, or ATen at once. `policy.Policy` decides it, for one thread."""
