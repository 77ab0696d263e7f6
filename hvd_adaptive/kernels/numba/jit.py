"""Configure Numba's compiler for this project: no fastmath, no GIL, cached if possible."""

from __future__ import annotations

from collections.abc import Callable

import numba

from hvd_adaptive.kernels.numba.host_cache import once_a_host, warn_uncached

_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": False, "boundscheck": False}


def jit(function: Callable) -> Callable:
    """Compile ``function`` on first use, once a host; cache it unless no folder can be written."""
    try:
        return once_a_host(numba.njit(function, cache=True, **_OPTIONS))
    except RuntimeError as error:  # Numba found no folder to cache in
        warn_uncached(str(error))
        return numba.njit(function, **_OPTIONS)


def inline(function: Callable) -> Callable:
    """Compile a helper that LLVM inlines into each kernel, so that constants reach its loops.

    Only kernels can call it: it has no entry for Python or C, which would take time to compile.
    """
    entries = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(function, forceinline=True, **entries, **_OPTIONS)
