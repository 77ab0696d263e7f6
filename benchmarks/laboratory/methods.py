"""Read methods with their backends: "[BACKEND/]METHOD", without a backend on mpi.

mpi/float32  gloo/float16             stock Horovod on its MPI or its Gloo operations
mpi/ALQ(bits=3, exchange='auto')      a scheme of hvd_adaptive on either of them
ddp/float32  ddp/float16  ddp/PowerSGD(rank=4)    PyTorch's DDP over Gloo, with its own hooks
ddp/ALQ(bits=3)                       a scheme of hvd_adaptive as DDP's hook
ddp:4/ALQ(bits=3)                     the same with bucket_cap_mb=4
fsdp/float32  fsdp/bfloat16  fsdp/EDEN(bits=4)    FSDP2's reduce-scatter over Gloo; reduce_dtype
gloo/ALQ(bits=2|3, coding='fixed'|'huffman')    every combination of the values that | separates
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hvd_adaptive.tools import methods

BACKENDS = ("mpi", "gloo", "ddp", "fsdp")
POWERSGD = "PowerSGD"
BFLOAT16 = "bfloat16"
NOTHING = "nothing"

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
    bucket_cap_mb: int | None = None

    @property
    def label(self) -> str:
        cap = "" if self.bucket_cap_mb is None else f":{self.bucket_cap_mb}"
        plain = self.is_bfloat16 or self.is_nothing
        return f"{self.backend}{cap}/{self.name if plain else self.method.label}"

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def is_scheme(self) -> bool:
        """Return whether it is a compressor of this package, or meant to be one."""
        others = self.is_powersgd, self.is_bfloat16, self.is_nothing
        return self.method.is_scheme and not any(others)

    @property
    def fits(self) -> bool:
        """Return whether it fits tables, so that its first steps differ from later ones."""
        return self.is_scheme and hasattr(self.method.scheme(), "fit")

    @property
    def is_powersgd(self) -> bool:
        """Return whether it is PyTorch's hook of this name."""
        return self.backend == "ddp" and self.name == POWERSGD

    @property
    def is_nothing(self) -> bool:
        """Return whether gradients stay on their rank."""
        return self.backend != "fsdp" and self.name == NOTHING

    @property
    def is_bfloat16(self) -> bool:
        """Return whether it is FSDP2's own reduce-scatter in this dtype."""
        return self.backend == "fsdp" and self.name == BFLOAT16


def parse(texts: Iterable[str]) -> list[Method]:
    """Return the methods of all texts, each once. Schemes are not constructed (``refusals``).

    Raises:
        ValueError: a text is no method, or names an unknown backend.
    """
    found = {method.label: method for text in texts for method in _read(text.strip())}
    return list(found.values())


def refusals(found: Iterable[Method]) -> dict[str, str]:
    """Return {label: why} of the schemes that this version of the package refuses."""
    refused = {}
    for method in found:
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
    head, colon, cap = head.partition(":")
    if colon and (head != "ddp" or not cap.isdigit() or int(cap) < 1):
        raise ValueError(f"{text!r}: must be ddp:MB/METHOD, MB an integer above 0")
    if head not in BACKENDS:
        raise ValueError(f"{text!r}: no backend {head!r}; there are {', '.join(BACKENDS)}")
    found = methods.read(tail)
    if head == "ddp":
        found = [
            _check_powersgd(text, m) if m.name.lower() == POWERSGD.lower() else m for m in found
        ]
    methods_found = [Method(head, method, int(cap) if cap else None) for method in found]
    if cap and any(method.is_powersgd for method in methods_found):
        raise ValueError(f"{text!r}: {POWERSGD} has one bucket; must be ddp/{POWERSGD}(rank=R)")
    return methods_found


def _check_powersgd(text: str, method: methods.Method) -> methods.Method:
    rank: Any = method.keywords.get("rank")
    if len(method.keywords) != 1 or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{text!r}: must be {POWERSGD}(rank=R), R an integer above 0")
    return replace(method, name=POWERSGD)
