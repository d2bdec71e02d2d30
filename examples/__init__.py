"""Programs to try the library on. Each train_*.py is plain PyTorch that runs on its own and knows nothing of it."""
