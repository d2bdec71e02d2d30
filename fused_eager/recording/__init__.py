"""Ops come in: written down, followed, or passed on."""
