"""Average tensors of a model's parameters outside of a backward pass, for LocalSGD."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hvd_adaptive.finite import wide_of
from hvd_adaptive.hooks.ddp.bucket_session import BucketSession
from hvd_adaptive.hooks.ddp.buckets import Bucket, BucketFuture, Names
from hvd_adaptive.hooks.ddp.names import plain_names
from hvd_adaptive.transport.horovod_rounds import HorovodRounds
from hvd_adaptive.transport.torch_world import TorchWorld

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor


class Exchange:
    """Averages of one tensor for each parameter, through a compressor.

    The tensors of one dtype are a bucket, as if DDP had filled it (bucket_session.py). So layout,
    keys, residuals, fits and checks are those of a step.

    Args:
        world: The ranks, of which there are several.
        parameters: The parameters.
        compressor: The compressor; None averages in full precision.
        named: Names of the parameters; if there are none, they are numbered.
    """

    def __init__(
        self,
        world: TorchWorld | HorovodRounds,
        parameters: Sequence[torch.nn.Parameter],
        compressor: GradientCompressor | None,
        named: Sequence[tuple[str, torch.nn.Parameter]],
    ) -> None:
        self.world, self._parameters = world, list(parameters)
        self._label = getattr(world, "label", "local")
        kinds: dict[Any, list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        self._kinds = list(kinds.values())
        self._session: BucketSession | None = None
        if compressor is not None:
            plain = plain_names(named, compressor.settings.parameter_bits or ())
            if plain:
                compressor.parts.warn_of_idle_patterns([name for name, _ in plain])
            names = Names(plain)
            self._session = BucketSession(compressor, names, None, lambda: world, self._label)
            compressor.connection = self._session

    def average(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the averages over all ranks, a collective."""
        flats = [torch.cat([tensors[i].reshape(-1) for i in kind]) for kind in self._kinds]
        parts = [
            flat.split([tensors[i].numel() for i in kind])
            for flat, kind in zip(flats, self._kinds, strict=True)
        ]
        if self._session is None:
            wide = [flat.to(wide_of(flat.dtype)) for flat in flats]
            self.world.average_all(wide, f"{self._label}.average")
            for flat, average in zip(flats, wide, strict=True):
                if average is not flat:
                    flat.copy_(average)
        else:
            for flat, kind, gradients in zip(flats, self._kinds, parts, strict=True):
                parameters = [self._parameters[i] for i in kind]
                devices: list[Any] = [flat.device] if flat.is_cuda else []
                future = BucketFuture(devices=devices)
                self._session.take(Bucket(flat, parameters, gradients, future))
            self._session.finish()
        averages = list(tensors)
        for of_kind, kind in zip(parts, self._kinds, strict=True):
            for index, part in zip(kind, of_kind, strict=True):
                averages[index] = part.view(tensors[index].shape)
        return averages


def find_world(
    group: dist.ProcessGroup | None, process_set: Any, label: str
) -> TorchWorld | HorovodRounds | None:
    """Return the ranks; None for one rank alone.

    If group and process_set are None, they are Horovod's if it is initialised, else
    torch.distributed's.

    Args:
        group: A group of torch.distributed.
        process_set: A process set of Horovod.
        label: Beginning of collectives' names, the same on all ranks, and unlike other callers'.

    Raises:
        ValueError: Both arguments are given.
    """
    if group is not None and process_set is not None:
        raise ValueError("process_group, process_set: give one of them")
    hvd = sys.modules.get("horovod.torch")
    world: TorchWorld | HorovodRounds
    if process_set is not None or (group is None and hvd is not None and hvd.is_initialized()):
        world = HorovodRounds(process_set, label)
    elif group is not None or (dist.is_available() and dist.is_initialized()):
        world = TorchWorld(group)
    else:
        return None
    return world if world.size > 1 else None
