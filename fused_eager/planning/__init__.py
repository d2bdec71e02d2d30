"""The stream into regions."""
