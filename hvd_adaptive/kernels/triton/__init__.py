"""The kernels for CUDA tensors, in Triton.

Functions without docstring and types are described in the module of the same name in reference/,
which has the same arguments and computes the same integers. Everything is queued on the current
stream of the tensors' device.
"""
