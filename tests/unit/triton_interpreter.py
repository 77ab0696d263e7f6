"""Triton kernels in tests: on the GPU where there is one, else in Triton's interpreter.

The interpreter is chosen by TRITON_INTERPRET, which conftest.py sets before Triton is loaded.
"""

from __future__ import annotations

import inspect
import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")


class _Patched:
    """The interpreter's changes to Triton's modules, made once for a kernel and what it calls: the
    interpreter makes them anew for each call, which took half of the time, and takes back the first
    alone."""

    def __init__(self, patch) -> None:
        self._patch, self._scopes = patch, {}

    def __call__(self, function) -> _Patched:
        modules = frozenset(
            id(value) for value in function.__globals__.values() if inspect.ismodule(value)
        )
        if modules not in self._scopes:
            self._scopes[modules] = self._patch(function)
        return self

    def restore(self) -> None:
        for scope in reversed(self._scopes.values()):
            scope.restore()
        self._scopes.clear()


def _mend() -> None:
    """Faster, without the checks for overflow that kernels switch off; and NumPy 2.4 makes no
    integer of an array with one dimension, as the interpreter does."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended
    interpreter._patch_lang = _Patched(interpreter._patch_lang)
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


if os.environ.get("TRITON_INTERPRET") == "1":
    _mend()
elif DEVICE.type == "cpu":
    pytest.skip("no GPU, and TRITON_INTERPRET is not set", allow_module_level=True)


def moved(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies on the device that the kernels are tested on."""
    return [tensor.to(DEVICE) for tensor in tensors]
