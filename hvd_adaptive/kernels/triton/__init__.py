"""The kernels for CUDA tensors, in Triton."""
