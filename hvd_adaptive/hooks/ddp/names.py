"""Names of parameters without what wrappers put in front of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

DDP, COMPILED = "module.", "_orig_mod."


def plain_names(
    named: Sequence[tuple[str, Any]], patterns: Iterable[str] = ()
) -> list[tuple[str, Any]]:
    """Return (name, parameter) pairs with the names that the parameters have in the plain model.

    DistributedDataParallel puts "module." in front of all names, torch.compile "_orig_mod." in
    front of those of the module that it compiles. A wrapper's name stays if one of the patterns has
    it, or if names would become equal.

    Args:
        named: As from ``model.named_parameters()``.
        patterns: Of ``parameter_bits``.
    """
    names = [name for name, _ in named]
    kept = [wrapper for wrapper in (DDP, COMPILED) if any(wrapper in p for p in patterns)]
    prefixes = tuple(wrapper for wrapper in (DDP, COMPILED) if wrapper not in kept)
    shortened = True
    while shortened:
        shortened = False
        for prefix in prefixes:
            if names and all(name.startswith(prefix) for name in names):
                names = [name.removeprefix(prefix) for name in names]
                shortened = True
    if COMPILED in prefixes:
        names = [f".{name}".replace(f".{COMPILED}", ".")[1:] for name in names]
    if len(set(names)) < len(names):
        return list(named)
    return [(name, parameter) for name, (_, parameter) in zip(names, named, strict=True)]
