"""Use compressors in FSDP2: the reduce-scatter of a ``fully_shard`` model travels as codes.

Each rank encodes every other rank's shard of a module's gradients, sends it, and decodes and adds
what it receives. The all-gathers of parameters do not change.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_adaptive.checkpoint import packed, unpacked
from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.hooks.fsdp.modules import (
    ShardedModule,
    group_of_shards,
    groups_of_shards,
    padding_of,
)
from hvd_adaptive.hooks.fsdp.session import ShardedSession
from hvd_adaptive.run.agreement import format_ranks

_numbers = itertools.count()
# All that exist, in the order of their construction, which is the same on all ranks.
_all: weakref.WeakValueDictionary[ShardedSession, Compressed] = weakref.WeakValueDictionary()


class Compressed:
    """Result of ``compress_reduce_scatter`` and ``compress_all_reduce``.

    Attributes:
        compressor: The compressor.

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> from hvd_adaptive import EDEN
        >>> from hvd_adaptive.fsdp import compress_reduce_scatter
        >>> compressed = compress_reduce_scatter(fully_shard(net), EDEN(bits=4))
        >>> net(inputs).sum().backward()
        >>> compressed.finish()  # steps of torch.optim.Optimizer do it themselves
        >>> figures = compressed.report()
    """

    def __init__(
        self, session: ShardedSession, model: nn.Module, group: dist.ProcessGroup | None
    ) -> None:
        self.compressor, self._session = session.compressor, session
        self._ranks = dist.get_process_group_ranks(group)
        self._model = weakref.ref(model)
        self._modules = weakref.WeakSet(model.modules())
        _hook_steps()
        _all[session] = self
        self.average = session.average
        if dist.get_world_size() > 1:
            weakref.finalize(self, session.warn_if_unused)

    def finish(self) -> None:
        """End a step: check what has arrived, and fit tables if that is due; a collective.

        Every step of a torch.optim.Optimizer that has a parameter of the model calls it, also
        after each call of a closure. Call it yourself before the step of another optimizer. It does
        nothing if nothing was reduced since the last call.

        Raises:
            PayloadError: A payload arrived corrupt, on any rank.
            RankMismatchError: Ranks have reduced different modules, or differ in the step.
        """
        self._session.finish()

    def report(self) -> dict[str, Any]:
        """Return the compressor's figures of the last step; see ``GradientCompressor.report``.

        A reduce-scatter sends all shards but this rank's own: of N ranks, its wire_bytes are
        (N - 1)/N of its payload_bytes.
        """
        return self.compressor.report()

    def serves(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer has a parameter of the model."""
        model = self._model()
        own = set() if model is None else set(map(id, model.parameters()))
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def has_any(self, modules: list[tuple[str, Any]], shards: bool) -> bool:
        """Return whether the compressor still serves one of these modules, in the same place."""
        is_there = self.compressor._training.connection is self._session
        own = self._modules if is_there and self._session.has_shards == shards else ()
        return any(module in own for _, module in modules)

    def state_dict(self) -> dict[str, Any]:
        """Return the compressor's states on all ranks as bytes, a collective of all ranks.

        torch.distributed.checkpoint saves such an entry once. For a file of each rank
        ``compressor.state_dict()`` is enough.
        """
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self._ranks, self.compressor.state_dict()))
        return {"compressor": packed(everyone)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. If other ranks exchange now, load the first one's.

        Raises:
            ValueError: The state is of another scheme or incomplete, or an earlier commit saved it.
        """
        everyone, rank = unpacked(state, "compressor"), dist.get_rank()
        if not all(isinstance(one, tuple | list) and len(one) == 2 for one in everyone):
            raise ValueError("state: compressor: must hold (ranks, state) of each rank")
        is_same = rank < len(everyone) and everyone[rank][0] == self._ranks
        self.compressor.load_state_dict(everyone[rank if is_same else 0][1])


def compress_reduce_scatter(model: nn.Module, compressor: GradientCompressor) -> Compressed:
    """Send the reduce-scatters of a ``fully_shard`` model as codes.

    Call it on every rank, after the last ``fully_shard``. A step of the compressor is a step of the
    optimizer: warm-up, schedule and fits of tables count these. Tables are fitted at the end of an
    update step, to gradients of all modules, and used from the next step on. Patterns of
    ``parameter_bits`` are those of modules' names; the outermost module's is "root". A module of
    fewer than ``min_numel`` coordinates is sent in full precision.

    Reduce operations AVG, SUM and PREMUL_SUM are supported (``set_gradient_divide_factor``), and
    float16, bfloat16, float32 and float64 as ``reduce_dtype``. Gradients are added in float32
    (float64 for float64), in rank order.

    Args:
        model: A model with modules that ``fully_shard`` has sharded over one group of ranks.
        compressor: A compressor that serves only this model, without error feedback: its residuals
            would be as large as the unsharded gradients.

    Returns:
        An object with ``finish``, ``state_dict`` and ``load_state_dict``.

    Raises:
        ValueError: An argument is not allowed.
        RuntimeError: This version of torch cannot replace the reduce-scatter.

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> from hvd_adaptive import EDEN
        >>> from hvd_adaptive.fsdp import compress_reduce_scatter
        >>> model = fully_shard(net)
        >>> compressed = compress_reduce_scatter(model, EDEN(bits=4))
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    modules = _modules_of(model, "set_custom_reduce_scatter")
    _check_unserved(modules, shards=True)
    session = _session(compressor, modules, shards=True)
    compressed = Compressed(session, model, group_of_shards(model))
    for index, (_, module) in enumerate(modules):
        module.set_custom_reduce_scatter(_ReduceScatter(compressed, index))
    return compressed


def compress_all_reduce(
    model: nn.Module, compressor: GradientCompressor, group: dist.ProcessGroup
) -> Compressed:
    """Average the shards of a ``fully_shard`` model between replicas, as codes.

    For a model that is sharded over the ranks of a node (a 1-D mesh) and replicated between nodes:
    after each reduce-scatter the shard is averaged over ``group``. Shards are bitwise equal on its
    ranks. See ``compress_reduce_scatter`` for steps, tables and names.

    Args:
        model: A model that ``fully_shard`` has sharded over a 1-D mesh.
        compressor: A compressor that serves only this, without error feedback.
        group: The ranks that hold this rank's shard.

    Returns:
        See ``compress_reduce_scatter``.

    Raises:
        ValueError: An argument is not allowed.
        RuntimeError: This version of torch has no such hook.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.fsdp import fully_shard
        >>> from hvd_adaptive import ALQ
        >>> from hvd_adaptive.fsdp import compress_all_reduce
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("nodes", "shards"))
        >>> model = fully_shard(net, mesh=mesh["shards"])
        >>> compressed = compress_all_reduce(model, ALQ(bits=3), mesh["nodes"].get_group())
    """
    modules = _modules_of(model, "set_all_reduce_hook")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group: must be a process group, not {type(group).__name__}")
    apart = set().union(*map(dist.get_process_group_ranks, groups_of_shards(model)))
    if others := apart.intersection(dist.get_process_group_ranks(group)) - {dist.get_rank()}:
        raise ValueError(
            f"group: {format_ranks(sorted(others))} of it and this rank hold different shards; "
            'must be the ranks that hold this rank\'s shard, such as mesh["nodes"].get_group()'
        )
    _check_unserved(modules, shards=False)
    compressed = Compressed(_session(compressor, modules, shards=False), model, group)
    ranks = dist.get_world_size(group)

    def hook(index: int, shard: torch.Tensor) -> None:
        if ranks > 1:
            compressed.average(index, shard, shard, group, 1.0 / ranks)

    for index, (_, module) in enumerate(modules):
        module.set_all_reduce_hook(functools.partial(hook, index))
    return compressed


@functools.cache
def _hook_steps() -> None:
    """Have torch call ``_before_step`` in every step, for good.

    A hook of each Compressed would be removed when it is freed, which may be while torch calls the
    hooks of another optimizer's step.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Finish what was reduced before the step, and what each call of a closure reduces."""
    served = [compressed for compressed in list(_all.values()) if compressed.serves(optimizer)]
    for compressed in served:
        compressed.finish()
    closure = keywords.get("closure", args[1] if len(args) > 1 else None)
    if not (served and callable(closure)):
        return None

    def finished() -> Any:
        loss = closure()
        for compressed in served:
            compressed.finish()
        return loss

    if "closure" in keywords:
        return args, keywords | {"closure": finished}
    return (args[0], finished, *args[2:]), keywords


def _modules_of(model: Any, method: str) -> list[tuple[str, Any]]:
    """Return names and modules, with ``method``, that FSDP2 has sharded, or raise ValueError."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: must be a torch.nn.Module, not {type(model).__name__}")
    try:
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    except ImportError:
        FSDPModule = FullyShardedDataParallel = None  # type: ignore[assignment, misc]
    if FSDPModule is None or not hasattr(FSDPModule, method):
        raise RuntimeError(
            f"compression of FSDP2 needs a newer torch: {torch.__version__} has no "
            f"FSDPModule.{method}"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "model: FullyShardedDataParallel (FSDP1) is not supported; shard the model by "
            "torch.distributed.fsdp.fully_shard"
        )
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not found and isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "model: DistributedDataParallel has a hook of its own: model.register_comm_hook("
            "hvd_adaptive.ddp.CompressionState(...), hvd_adaptive.ddp.compression_hook)"
        )
    if not found:
        raise ValueError("model: fully_shard has sharded none of its modules; call it before")
    return [(name or "root", module) for name, module in found]


def _check_unserved(modules: list[tuple[str, Any]], shards: bool) -> None:
    """Raise ValueError if another compressor serves one of the modules."""
    if any(compressed.has_any(modules, shards) for compressed in list(_all.values())):
        raise ValueError("model: another compressor already serves it; close() that one before")


def _session(compressor: Any, modules: list[tuple[str, Any]], shards: bool) -> ShardedSession:
    settings = check_compressor("compressor", compressor, is_free=True).settings
    if settings.error_feedback is not None:
        raise ValueError(
            f"error_feedback={settings.error_feedback!r}: must be None with FSDP, whose sharding "
            "residuals of unsharded size would undo"
        )
    if settings.process_set is not None:
        raise ValueError("process_set: must be None; FSDP's ranks are those of the model's mesh")
    allowed = (None, "scatter_reduce") if shards else (None, "allgather", "scatter_reduce")
    if settings.exchange_name not in allowed:
        raise ValueError(
            f"exchange={settings.exchange!r}: must be one of {', '.join(map(repr, allowed))} with "
            "FSDP" + (", of whose averages each rank keeps its shard" if shards else "")
        )
    known = {id(module) for _, module in modules}
    sharded = []
    for name, module in modules:
        inner = [m for m in module.modules() if m is not module and id(m) in known]
        theirs = {id(p) for m in inner for p in m.parameters()}
        own = [p for p in module.parameters() if id(p) not in theirs]
        padding = sum(padding_of(parameter, shards) for parameter in own)
        sharded.append(ShardedModule(name, sum(p.numel() for p in own), padding))
    compressor.parts.warn_of_idle_patterns([name for name, _ in modules])
    label = f"hvd_adaptive.fsdp{next(_numbers)}"
    compressor._training.connection = session = ShardedSession(compressor, sharded, label, shards)
    return session


class _ReduceScatter:
    """The reduce-scatter of a module, as ``FSDPModule.set_custom_reduce_scatter`` expects it."""

    def __init__(self, compressed: Compressed, index: int) -> None:
        self._compressed, self._index = compressed, index

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        factor = _factor_of(op, dist.get_world_size(group))
        self._compressed.average(self._index, input_tensor, output_tensor, group, factor)


def _factor_of(op: Any, ranks: int) -> float:
    """Return the factor of a sum over ranks that is the operation's result, or raise ValueError."""
    kinds: Any = dist.ReduceOp.RedOpType
    kind = op if isinstance(op, kinds) else op.op
    if kind == kinds.AVG:
        return 1.0 / ranks
    if kind == kinds.SUM:
        return 1.0
    if kind == kinds.PREMUL_SUM:
        return float(op.factor)
    raise ValueError(f"op={kind}: must be AVG, SUM or PREMUL_SUM")
