"""Names of the parameters of a DistributedDataParallel model."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Sequence

import torch

from hvd_adaptive import states
from hvd_adaptive.settings import Settings

UNNAMED = (
    "parameter_bits: the parameters' names are unknown: give CompressionState "
    "model.named_parameters()"
)
UNPICKLED = (
    "parameter_bits: the parameters' names are unknown, because the loaded CompressionState is of "
    "a model with other parameters: construct CompressionState(compressor, "
    "model.named_parameters()), and load the saved state.compressor.state_dict() into its "
    "compressor"
)
TWO_MODELS = (
    "compression_hook: the CompressionState serves two models in turn: give each a compressor and "
    "a CompressionState of its own. If these are parts of one model, give CompressionState "
    "model.named_parameters()"
)


class Names:
    """Names of a model's parameters.

    Args:
        given: (name, parameter) pairs. If there are none, parameters are numbered in the order of
            the first step's buckets.
        numbered: What ``saved`` returned in another process.
    """

    def __init__(
        self,
        given: Sequence[tuple[str, torch.nn.Parameter]],
        numbered: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        self._are_given = bool(given)
        self._by_id = {id(parameter): name for name, parameter in given}
        self._alive = list(given)  # so that no other parameter gets one of these ids
        self._former: list[weakref.ref[torch.nn.Parameter]] = []  # of models before this one
        self._numbered = [(*known, 0)[:3] for known in numbered]  # earlier ones lack a checksum

    def saved(self) -> list[tuple[str, int, int]]:
        """Return (name, coordinates, checksum) of the parameters, in the order of the first step's
        buckets, or of all that were given.
        """
        checksums = states.checksums(parameter for _, parameter in self._alive)
        named = zip(self._alive, checksums, strict=True)
        own = {name: (name, p.numel(), checksum) for (name, p), checksum in named}
        return [own.get(known[0], known) for known in self._numbered] or list(own.values())

    def name_of(self, parameter: torch.nn.Parameter, number: int) -> str:
        """Return a parameter's name; its number and shape if it has none yet."""
        unknown = f"number {number} of shape {tuple(parameter.shape)}"
        return self._by_id.get(id(parameter), unknown)

    def compared(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> list[tuple[str, torch.nn.Parameter]]:
        """Return ``parameters``, those of buckets, and the frozen ones: ranks have them alike.

        Others, which require a gradient, are those that DDP was made to ignore.
        """
        taken = set(map(id, parameters))
        return [(n, p) for n, p in self._alive if id(p) in taken or not p.requires_grad]

    def of(self, parameters: Sequence[torch.nn.Parameter], settings: Settings) -> dict[int, str]:
        """Return the names of ``parameters``, those of a step's buckets, by ``id``.

        Raises:
            ValueError: The names that were given lack a parameter, or ``parameter_bits`` needs
                names.
            RuntimeError: No names were given, and the parameters are of a model whose place
                another one has taken.
        """
        missing = [p for p in parameters if id(p) not in self._by_id]
        if missing and self._are_given:
            shapes = ", ".join(str(tuple(p.shape)) for p in missing[:3])
            raise ValueError(
                f"named_parameters: lacks {len(missing)} of the model's parameters, of shapes "
                f"{shapes}: give those of the model that the hook is registered with"
            )
        if missing:
            if len(missing) == len(parameters):
                self._replace(missing)
            self._number(missing, settings)
        if missing or len(self._numbered) != len(parameters):
            self._numbered = [(self._by_id[id(p)], p.numel(), 0) for p in parameters]
        return self._by_id

    def _replace(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Let another model take the place of the one so far."""
        former = {id(reference()) for reference in self._former}
        if any(id(p) in former for p in parameters):
            raise RuntimeError(TWO_MODELS)
        self._former += [weakref.ref(p) for _, p in self._alive]
        self._alive, self._by_id = [], {}

    def _number(self, missing: Sequence[torch.nn.Parameter], settings: Settings) -> None:
        """Name parameters as another process did, or else by the next numbers."""
        is_new = self._numbered and not self._by_id
        names = self._recognised(missing) if is_new else []
        if not names and settings.parameter_bits is not None:
            raise ValueError(UNPICKLED if self._numbered else UNNAMED)
        if not names:
            taken = set(self._by_id.values())
            free = (name for name in map(str, itertools.count()) if name not in taken)
            names = list(itertools.islice(free, len(missing)))
        self._alive += zip(names, missing, strict=True)
        self._by_id = {id(parameter): name for name, parameter in self._alive}

    def _recognised(self, parameters: Sequence[torch.nn.Parameter]) -> list[str]:
        """Return the names that another process gave these parameters: by sizes and values or, if
        the weights are others, by sizes in this order; [] if these differ.
        """
        saved, sizes = self._numbered, [p.numel() for p in parameters]
        own = list(zip(sizes, states.checksums(parameters), strict=True))
        named: dict[tuple[int, int], list[str]] = {}
        for name, *kind in reversed(saved):
            named.setdefault((kind[0], kind[1]), []).append(name)
        if all(len(named.get(kind, ())) >= count for kind, count in Counter(own).items()):
            return [named[kind].pop() for kind in own]
        return [name for name, *_ in saved] if sizes == [size for _, size, _ in saved] else []
