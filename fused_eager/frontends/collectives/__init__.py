"""The process-group door: `dist.init_process_group("fused_eager")`, and collectives of a device's tensors."""
