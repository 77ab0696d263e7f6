"""Names of the parameters of a DistributedDataParallel model."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
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
        numbered: Another process's (name, coordinates) in that order, used if the sizes are alike.
    """

    def __init__(
        self,
        given: Sequence[tuple[str, torch.nn.Parameter]],
        numbered: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._are_given = bool(given)
        self._by_id = {id(parameter): name for name, parameter in given}
        self._alive = list(given)  # so that no other parameter gets one of these ids
        self._former: list[weakref.ref[torch.nn.Parameter]] = []  # of models before this one
        self.numbered = list(numbered)

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
        if missing or len(self.numbered) != len(parameters):
            self.numbered = [(self._by_id[id(p)], p.numel()) for p in parameters]
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
        sizes = [size for _, size in self.numbered]
        if not self._by_id and sizes == [p.numel() for p in missing]:
            names = [name for name, _ in self.numbered]
        elif settings.parameter_bits is None:
            taken = set(self._by_id.values())
            free = (name for name in map(str, itertools.count()) if name not in taken)
            names = list(itertools.islice(free, len(missing)))
        else:
            raise ValueError(UNPICKLED if self.numbered else UNNAMED)
        self._alive += zip(names, missing, strict=True)
        self._by_id = {id(parameter): name for name, parameter in self._alive}
