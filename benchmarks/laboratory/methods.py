"""What is exchanged, and by which backend: "[BACKEND/]METHOD", without a backend on mpi.

mpi/float32  gloo/float16             stock Horovod on its MPI or its Gloo operations
mpi/ALQ(bits=3, exchange='auto')      a scheme of hvd_adaptive on either of them
ddp/float32  ddp/float16  ddp/PowerSGD(rank=4)    PyTorch's DDP over Gloo, with its own hooks
gloo/ALQ(bits=2|3, coding='fixed'|'huffman')    every combination of the values that | separates
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.tools import methods
from hvd_adaptive.tools.methods import STOCK

BACKENDS = ("mpi", "gloo", "ddp")
POWERSGD = "PowerSGD"

DEFAULTS = (
    "mpi/float32",
    "mpi/float16",
    "gloo/float32",
    "gloo/float16",
    "ddp/float32",
    "ddp/float16",
    "ddp/PowerSGD(rank=1|4)",
    "ALQ(bits=3, exchange='allgather'|'scatter_reduce', coding='fixed'|'huffman')",
    "gloo/ALQ(bits=3, exchange='allgather'|'scatter_reduce')",
)


@dataclass(frozen=True)
class Method:
    """A method on a backend; ``label`` names it in tables and files, and ``parse`` reads it."""

    backend: str
    method: methods.Method

    @property
    def label(self) -> str:
        return f"{self.backend}/{self.method}"

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def is_scheme(self) -> bool:
        """Whether it is a compressor of this package."""
        return self.backend != "ddp" and self.method.is_scheme


def parse(texts: Iterable[str]) -> list[Method]:
    """Return the methods of all texts, each once. Schemes are not constructed (``refusals``).

    Raises:
        ValueError: a text is no method, or names an unknown backend or hook.
    """
    found = {method.label: method for text in texts for method in _read(text.strip())}
    return list(found.values())


def refusals(asked: Iterable[Method]) -> dict[str, str]:
    """Return {label: why} of the schemes that this version of the package refuses."""
    refused = {}
    for method in asked:
        if method.is_scheme:
            try:
                method.method.scheme()
            except ValueError as error:
                refused[method.label] = str(error)
    return refused


def _read(text: str) -> list[Method]:
    head, slash, tail = text.partition("/")
    if not slash or "(" in head:
        head, tail = "mpi", text
    if head not in BACKENDS:
        raise ValueError(f"{text!r}: no backend {head!r}; there are {', '.join(BACKENDS)}")
    found = methods.read(tail)
    if head == "ddp":
        for method in found:
            _check_hook(text, method)
    return [Method(head, method) for method in found]


def _check_hook(text: str, method: methods.Method) -> None:
    if method.name not in (*STOCK, POWERSGD):
        raise ValueError(f"{text!r}: DDP's hooks are {', '.join([*STOCK, POWERSGD])}")
    rank: Any = method.keywords.get("rank")
    is_rank = isinstance(rank, int) and rank > 0 and len(method.keywords) == 1
    if method.name == POWERSGD and not is_rank:
        raise ValueError(f"{text!r}: must be {POWERSGD}(rank=R), R an integer above 0")
