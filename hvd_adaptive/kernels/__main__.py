"""Compile every Numba kernel into its cache: ``python -m hvd_adaptive.kernels``."""

from hvd_adaptive.kernels.numba.warm import compile_all

if __name__ == "__main__":
    compile_all()
