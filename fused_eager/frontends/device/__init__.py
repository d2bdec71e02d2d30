"""The device: ops on tensors of the device type `tpu` arrive through kernels of torch's dispatch key PrivateUse1."""
