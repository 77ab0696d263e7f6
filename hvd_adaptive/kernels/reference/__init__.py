"""The kernels for tensors on any device, in plain torch: the oracles of the fast ones.

Every product and sum is its own float32 operation, in the order that the fast kernels follow, so
that results can be compared bit for bit.
"""
