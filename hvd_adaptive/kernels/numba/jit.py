"""Configure Numba's compiler for this project: no fastmath, no GIL, cached if possible."""

from __future__ import annotations

from collections.abc import Callable

import numba

_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": False, "boundscheck": False}


def jit(function: Callable) -> Callable:
    """Compile ``function`` on first use; cache it on disk unless no cache folder can be written."""
    try:
        return numba.njit(function, cache=True, **_OPTIONS)
    except RuntimeError:  # Numba found no folder to cache in
        return numba.njit(function, **_OPTIONS)


def inline(function: Callable) -> Callable:
    """Compile a helper that LLVM inlines into each kernel, so that constants reach its loops."""
    return numba.njit(function, forceinline=True, **_OPTIONS)
