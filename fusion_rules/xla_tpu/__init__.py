"""What XLA has otherwise on TPUs."""
