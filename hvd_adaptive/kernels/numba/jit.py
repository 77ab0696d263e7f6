"""Configure Numba's compiler for this project: no fastmath, no GIL, cached if possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

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
    return _helper(function, _Inlined)


def outline(function: Callable) -> Callable:
    """Compile a helper as ``inline`` does, but once in each kernel, however often it is called."""
    return _helper(function, _Outlined)


# What _HelperLibrary replaces or calls in Numba. Without it helpers compile as kernels do.
_PRIVATE = (
    "_optimize_final_module",
    "_finalize_final_module",
    "_finalize_dynamic_globals",
    "get_pointer_to_function",
    "add_ir_module",
)


def _helper(function: Callable, compiler: type[Compiler]) -> Callable:
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **_OPTIONS}
    if all(hasattr(JITCodeLibrary, name) for name in _PRIVATE):
        options["pipeline_class"] = compiler
    return numba.njit(function, forceinline=compiler is _Inlined, **options)


class _HelperLibrary(JITCodeLibrary):
    """Keep the code of a helper as it is until a kernel that calls it is optimised as a whole.

    Numba optimises each helper by itself, and emits machine code for it that nothing runs.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no machine code."""
        return 0

    @property
    def codegen(self) -> Any:
        """Return what Numba gives the environment of machine code to."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing, as there is no machine code."""


class _OutlinedLibrary(_HelperLibrary):
    """Keep LLVM from inlining the helper."""

    def add_ir_module(self, ir_module: Any) -> None:
        """Add the helper's code."""
        for function in ir_module.functions:
            if not function.is_declaration:
                function.attributes.add("noinline")
        super().add_ir_module(ir_module)


class _Inlined(Compiler):
    """Compile a helper into its library."""

    library: type[JITCodeLibrary] = _HelperLibrary

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        library = self.library(target.codegen(), "helper")
        library.enable_object_caching()
        super().__init__(typing, target, library, *rest)


class _Outlined(_Inlined):
    library = _OutlinedLibrary
