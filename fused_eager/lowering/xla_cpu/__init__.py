"""What makes a region faster on XLA:CPU: loops over blocks of rows, in stages, and images that lie by pixels."""
