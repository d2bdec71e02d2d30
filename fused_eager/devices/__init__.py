"""Devices: where values are. `device` is the interface, `host` the CPU's tensors in place, `accelerator` tensors whose
storages have no memory of the host's: a JAX array each, on any platform that JAX has."""
