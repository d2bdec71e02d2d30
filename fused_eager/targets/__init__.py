"""Targets: devices that regions are compiled for on a host that has none of them."""
