"""What lowering does to a whole region for TPUs."""
