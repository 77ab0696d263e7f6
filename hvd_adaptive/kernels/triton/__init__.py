"""The kernels for CUDA tensors, in Triton.

Functions that have no docstring are described in the module of the same name in reference/, which
has the same signatures and the same integers.
"""
