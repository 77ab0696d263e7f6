"""Check LocalSGD's arguments and states; find states that are mixed up."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvd_adaptive import states
from hvd_adaptive.base.checks import is_real
from hvd_adaptive.base.tensors import check_supported
from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.hooks.wrapped_optimizer import WrappedOptimizer
from hvd_adaptive.keywords import unknown_keyword
from hvd_adaptive.training import rank_and_size


def check_arguments(
    kind: type, unknown: Iterable[str], optimizer: Any, compressor: Any, momentum: Any, lr: Any
) -> None:
    """Raise ValueError if an argument of LocalSGD is not allowed, TypeError if one is unknown."""
    for name in unknown:
        raise unknown_keyword(kind, name)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer={optimizer!r}: must be a torch optimizer")
    if hasattr(optimizer, "synchronize"):
        raise ValueError(
            "optimizer: must be a torch optimizer, not hvd.DistributedOptimizer, which averages at "
            "every step"
        )
    if isinstance(optimizer, WrappedOptimizer):
        raise ValueError("optimizer: must not be a LocalSGD itself")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        check_supported(parameter.device)
    if any(type(parameter).__name__ == "DTensor" for parameter in parameters):
        raise ValueError(
            "optimizer: its parameters must not be DTensors, as those of fully_shard; a model that "
            "FSDP2 shards has hvd_adaptive.fsdp.compress_reduce_scatter"
        )
    if any(map(torch.is_complex, parameters)):
        raise ValueError("optimizer: complex parameters are not supported")
    if not is_real(momentum) or not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum!r}: must be a number of at least 0 and below 1")
    if not is_real(lr) or not 0 < lr < float("inf"):
        raise ValueError(f"lr={lr!r}: must be a number above 0")
    if compressor is None:
        return
    check_compressor("compression", compressor, is_free=True)
    if compressor.settings.process_set is not None:
        raise ValueError("process_set: give it to LocalSGD, not to the compressor")


def check_alone(process_group: Any, process_set: Any) -> None:
    """Raise RuntimeError if there are other ranks now; see ``find_world`` for the arguments."""
    number = rank_and_size()[1] if process_group is None and process_set is None else 1
    if number > 1:
        raise RuntimeError(
            f"LocalSGD: has found no other ranks, but there are {number} now: construct it after "
            "torch.distributed.init_process_group() or hvd.init(), or call connect() on every rank"
        )


def names_of(given: Any, compressor: GradientCompressor | None) -> dict[torch.nn.Parameter, str]:
    """Return names by parameter, without those of wrappers; none if none are given."""
    named = list(given or ())
    if compressor is not None:
        if compressor.settings.parameter_bits is not None and not named:
            raise ValueError(
                "parameter_bits: the parameters' names are unknown: give LocalSGD named_parameters="
            )
        named = compressor.parts.plainly_named(named)
    return {parameter: name for name, parameter in named}


def check_mixing(mixing: Any, delay: int) -> float:
    """Return ``mixing``, or its default; raise ValueError if it is not allowed."""
    if mixing is None:
        return 0.5 if delay else 0.0
    if not is_real(mixing) or not 0 <= mixing < 1:
        raise ValueError(f"mixing={mixing!r}: must be a number of at least 0 and below 1")
    if mixing and not delay:
        raise ValueError(f"mixing={mixing!r}: needs a delay of at least 1")
    return float(mixing)


ADVICE = (
    "torch.distributed.checkpoint keeps one rank's tensors, and reads those that a new state has: "
    "save PerRank(model=model, optimizer=optimizer) of hvd_adaptive.checkpoint, or a file of each "
    "rank by torch.save"
)


def check_own(state: Mapping[str, Any], rank: int) -> None:
    """Raise ValueError unless a state is whole and may be loaded on this rank."""
    own, moved = states.entry(state, "own"), states.entry(state, "moved")
    inner, pending = states.entry(state, "optimizer"), states.entry(state, "pending")
    saver = states.whole(own, "rank", of="state: own")
    if states.entry(own, "checksum", "state: own") != own_checksum(saver, inner, pending):
        raise ValueError(f"state: the optimizer's state is lost, or of several ranks. {ADVICE}")
    if saver != rank and (pending is not None or any(moved)):
        raise ValueError(
            f"state: rank {saver} saved it within a round, and this is rank {rank}, which has "
            f"parameters and a state of its own. {ADVICE}"
        )


def moved_of(state: Mapping[str, Any], fragments: int) -> list[bool]:
    """Return by fragment whether the rank had moved its parameters."""
    moved = states.entry(state, "moved")
    if not isinstance(moved, list) or len(moved) != fragments:
        raise ValueError(f"state: moved={moved!r}: must be a list for fragments={fragments}")
    return list(map(bool, moved))


def tensors_like(
    parameters: Sequence[torch.Tensor], state: Any, name: str, of: str = "state"
) -> Sequence[Any]:
    """Return the entry ``name`` of a state, tensors of the parameters' shapes or None, or raise
    ValueError; ``of`` names the state.
    """
    tensors = states.entry(state, name, of)
    if len(tensors) != len(parameters) or any(
        tensor is not None and getattr(tensor, "shape", None) != p.shape
        for tensor, p in zip(tensors, parameters, strict=True)
    ):
        raise ValueError(f"{of}: {name} are not those of this optimizer's parameters")
    return tensors


def own_checksum(rank: int, inner: Any, pending: Any) -> int:
    """Return 32 bits of what a rank has for itself."""
    tensors: list[torch.Tensor] = []
    others: list[Any] = [rank]

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, Mapping):
            for name, one in value.items():
                others.append(name)
                visit(one)
        elif isinstance(value, list | tuple):
            for one in value:
                visit(one)
        else:
            others.append(value)

    visit((states.entry(inner, "state", "state: optimizer"), pending))
    return zlib.crc32(repr((others, states.checksums(tensors))).encode())
