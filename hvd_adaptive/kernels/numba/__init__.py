"""The kernels for CPU tensors, in Numba."""
