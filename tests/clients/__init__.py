"""Programs as people write them, on both doors, compared with plain PyTorch on the CPU: `make test-clients`."""
