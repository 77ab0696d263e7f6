"""The kernels for tensors on any device, in plain torch: the oracles of the fast ones."""
