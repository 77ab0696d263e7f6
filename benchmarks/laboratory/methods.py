"""What is asked for: "backend/name:keyword=value,..." becomes a Method, a Method a compressor.

mpi/none  gloo/fp16                   stock Horovod on its MPI or its Gloo operations
ddp/none  ddp/fp16  ddp/powersgd:rank=4    PyTorch's DDP over Gloo, with its own hooks
alq:bits=3,exchange=scatter_reduce    a scheme of hvd_adaptive with its keywords, on mpi/
gloo/alq:bits=2|3,coding=fixed|huffman     every combination of the values that | parts
"""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import asdict, dataclass, field
from typing import Any

BACKENDS = ("mpi", "gloo", "ddp")
STOCK = ("none", "fp16")
DDP_HOOKS = (*STOCK, "powersgd")

DEFAULTS = (
    "mpi/none",
    "mpi/fp16",
    "gloo/none",
    "gloo/fp16",
    "ddp/none",
    "ddp/fp16",
    "ddp/powersgd:rank=1|4",
    "alq:bits=3,exchange=allgather|scatter_reduce,coding=fixed|huffman",
    "gloo/alq:bits=3,exchange=allgather|scatter_reduce",
)


@dataclass(frozen=True)
class Method:
    """One way to exchange gradients; ``label`` names it in tables and files."""

    backend: str
    name: str
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        told = ",".join(f"{key}={value}" for key, value in self.keywords.items())
        return f"{self.backend}/{self.name}" + (f":{told}" if told else "")

    @property
    def is_scheme(self) -> bool:
        """Whether it is a compressor of this package."""
        return self.backend != "ddp" and self.name not in STOCK

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse(specs: list[str]) -> list[Method]:
    """The methods of all specs, alternatives spread out, each once; ValueError names a bad one."""
    found = {m.label: m for spec in specs for m in _expand(spec)}
    return list(found.values())


def _expand(spec: str) -> list[Method]:
    head, colon, tail = spec.strip().partition(":")
    backend, slash, name = head.lower().rpartition("/")
    if not slash:
        backend = "mpi"
    if backend not in BACKENDS:
        raise ValueError(f"{spec!r}: no backend {backend!r}; there are {', '.join(BACKENDS)}")
    if not name or (colon and not tail):
        raise ValueError(f"{spec!r}: must be [backend/]name[:keyword=value,...]")
    if backend == "ddp" and name not in DDP_HOOKS:
        raise ValueError(f"{spec!r}: DDP's hooks are {', '.join(DDP_HOOKS)}")
    choices = [_choices(spec, part) for part in _split(tail, ",")] if tail else []
    methods = [Method(backend, name, dict(pairs)) for pairs in itertools.product(*choices)]
    for method in methods:
        _check_stock(spec, method)
    return methods


def _check_stock(spec: str, method: Method) -> None:
    allowed = {"rank"} if method.name == "powersgd" else set()
    if not method.is_scheme and set(method.keywords) != allowed:
        wanted = "rank=R" if allowed else "no keywords"
        raise ValueError(f"{spec!r}: {method.backend}/{method.name} takes {wanted}")
    rank = method.keywords.get("rank", 1)
    if allowed and (not isinstance(rank, int) or rank < 1):
        raise ValueError(f"{spec!r}: rank must be an integer above 0")


def _choices(spec: str, part: str) -> list[tuple[str, Any]]:
    """(keyword, value) for each alternative."""
    keyword, equals, values = part.partition("=")
    if not equals or not keyword.strip().isidentifier() or not values:
        raise ValueError(f"{spec!r}: {part!r} must be keyword=value")
    return [(keyword.strip(), _value(value)) for value in _split(values, "|")]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


def _split(text: str, mark: str) -> list[str]:
    """At each mark outside of brackets."""
    return re.split(rf"{re.escape(mark)}(?![^(\[{{]*[)\]}}])", text)


def scheme_names() -> dict[str, str]:
    """Names of the package's compressors: in small letters -> as they are exported."""
    import hvd_adaptive
    from hvd_adaptive.compressor import GradientCompressor

    exported = {name: getattr(hvd_adaptive, name) for name in hvd_adaptive.__all__}
    return {
        name.lower(): name
        for name, value in exported.items()
        if isinstance(value, type) and issubclass(value, GradientCompressor)
    }


def construct(method: Method) -> Any:
    """The compressor of a scheme; ValueError where this version of the package refuses it."""
    import hvd_adaptive

    names = scheme_names()
    if method.name not in names:
        raise ValueError(f"no scheme {method.name!r}; there are {', '.join(sorted(names))}")
    try:
        return getattr(hvd_adaptive, names[method.name])(**method.keywords)
    except (TypeError, NotImplementedError) as error:
        raise ValueError(str(error)) from error


def refusals(methods: list[Method]) -> dict[str, str]:
    """Label -> why, for each scheme that cannot be constructed."""
    refused = {}
    for method in methods:
        if method.is_scheme:
            try:
                construct(method)
            except ValueError as error:
                refused[method.label] = str(error)
    return refused
