"""Use compressors as a communication hook of DistributedDataParallel, over torch.distributed.

Codec, schemes, exchanges, error feedback and table updates are those of Horovod's optimizers; only
the collectives differ. The backends are gloo and nccl.
"""

# No ``from __future__ import annotations``: DDP compares a hook's annotations with types.

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from hvd_adaptive import states
from hvd_adaptive.base.checks import check_named_parameters
from hvd_adaptive.base.tensors import check_supported
from hvd_adaptive.changes import keywords_of
from hvd_adaptive.checkpoint import key_of_rank, packed, unpacked
from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.hooks.ddp.bucket_session import BucketSession, called_by_autograd
from hvd_adaptive.hooks.ddp.buckets import Bucket
from hvd_adaptive.hooks.ddp.names import Names
from hvd_adaptive.hooks.horovod import elastic
from hvd_adaptive.run.agreement import format_ranks
from hvd_adaptive.settings import keyword_of

logger = logging.getLogger("hvd_adaptive")


class CompressionState:
    """State of ``compression_hook``: a compressor that serves one DDP model.

    Every rank ends every step with the same bits. A single process sends nothing, and its gradients
    stay unchanged. Sparse gradients, and dtypes that payloads do not support, are averaged by
    torch.distributed's allreduce.

    The state can be pickled, as DDP's hooks are saved (``torch.save({"hook": hook, "state": state},
    path)``). The pickle contains the compressor's keywords and state: tables, step, settings, and
    this rank's residuals. It does not contain the process group (the default one is used after
    loading), parameters, monitor and grad_scaler. Parameters get their names again by their values
    or, if the weights are others, by their sizes, in the order of the first buckets. If you need
    monitor or grad_scaler, construct a new state and load ``state.compressor.state_dict()``.

    Args:
        compressor: A compressor that serves only this state.
        named_parameters: As from ``model.named_parameters()``. parameter_bits, scope="tensor" and
            residuals in checkpoints refer to parameters by these names, without the "module." of
            DistributedDataParallel and the "_orig_mod." of torch.compile (which stay if a pattern
            of parameter_bits has them). If None here and in the compressor, parameters are numbered
            in the order of the first step's buckets.
        process_group: The model's process group; the default one if None.

    Raises:
        ValueError: ``compressor`` is not a compressor, serves another optimizer or model, or has a
            process_set; or a parameter is on another device than the CPU or a GPU of CUDA or ROCm.

    Examples:
        >>> from hvd_adaptive import ALQ
        >>> from hvd_adaptive.ddp import CompressionState, compression_hook
        >>> model = DistributedDataParallel(net)
        >>> state = CompressionState(ALQ(bits=3), net.named_parameters())
        >>> model.register_comm_hook(state, compression_hook)
        >>> model(inputs).sum().backward()
        >>> figures = state.report()
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_compressor("compressor", compressor, is_free=True)
        if compressor.settings.process_set is not None:
            raise ValueError(
                "process_set: must be None; give CompressionState the model's process_group"
            )
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            kind = type(process_group).__name__
            raise ValueError(f"process_group: must be a process group, not {kind}")
        if named_parameters is None:
            named_parameters = compressor.settings.named_parameters
        given = check_named_parameters("named_parameters", named_parameters) or []
        for _, parameter in given:
            if type(parameter).__name__ in ("DTensor", "FlatParameter"):
                raise ValueError(
                    "named_parameters: the model is sharded by FSDP, which has no hooks of this "
                    "kind; use fully_shard and hvd_adaptive.fsdp.compress_reduce_scatter"
                )
            check_supported(parameter.device)
        self._set_up(compressor, Names(compressor.parts.plainly_named(given)), process_group)

    def _set_up(
        self, compressor: GradientCompressor, names: Names, process_group: dist.ProcessGroup | None
    ) -> None:
        self.compressor = compressor
        self.session = BucketSession(compressor, names, process_group)
        compressor._training.connection = self.session
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            weakref.finalize(self, self.session.warn_if_unused)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Return the model's process group, or None for the default one."""
        return self.session.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        self.session.reconnect()  # the compressor serves nothing else
        self.session.was_used = True  # another session continues
        self._set_up(self.compressor, self.session.names, group)

    def report(self) -> dict[str, Any]:
        """Return the compressor's figures of the last step; see ``GradientCompressor.report``."""
        return self.compressor.report()

    def state_dict(self) -> dict[str, bytes]:
        """Return the compressor's state for torch.distributed.checkpoint.

        ``dcp.save({"compression": state, ...})`` and ``dcp.load`` call this themselves.

        Its keys are the same in every step: "shared" is what all ranks of the model have alike, and
        "rank 0 of 2" the whole state of a rank, with its residuals. A checkpoint holds those of all
        ranks. Another number of ranks has other keys, which ``dcp.load`` refuses. With
        ``planner=DefaultLoadPlanner(allow_partial_load=True)`` it loads "shared".
        """
        own = self.compressor.state_dict()
        shared, of_rank = self._keys()
        return {shared: packed(elastic.without_own(own)), of_rank: packed(own)}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Load what ``state_dict`` returned, on every rank.

        If the state of this rank is not of the step of the shared one, because another number of
        ranks has saved them, residuals start from zero, with a warning.

        Raises:
            ValueError: The state is of another scheme or incomplete; nothing has changed.
        """
        shared, own = (unpacked(state, key) for key in self._keys())
        if states.whole(own, "step") != states.whole(shared, "step"):
            logger.warning("the state has none of this rank: residuals start from zero")
            own = elastic.with_own(shared, self.compressor.state_dict())
        self.compressor.load_state_dict(own)

    def _keys(self) -> tuple[str, str]:
        """Return the keys of the shared state and of this rank's own."""
        if not (dist.is_available() and dist.is_initialized()):
            return "shared", key_of_rank()
        ranks = dist.get_process_group_ranks(self.process_group)
        everyone = len(ranks) == dist.get_world_size()
        shared = "shared" if everyone else f"shared by {format_ranks(ranks)}"
        return shared, key_of_rank()

    def abandon(self) -> None:
        """Give up the step in progress, which an error has cut off; without one, do nothing.

        Every rank of the model must call this at the same place.
        """
        self.session.abandon()

    def follow_scale(self, scaler: torch.amp.GradScaler | None) -> None:
        """Let residuals of error feedback follow the loss scale of a GradScaler.

        The compressor's own ``grad_scaler`` takes precedence.

        Args:
            scaler: The scaler; None if gradients are not scaled.
        """
        if self.compressor.settings.grad_scaler is None:
            self.compressor._training.follow_scale(scaler)

    def close(self) -> None:
        """Release the compressor, which another state may then serve.

        Every rank of the model must call this at the same place, when no backward pass runs.
        """
        self.session.close()
        self.session.release()

    if not TYPE_CHECKING:  # unknown attributes remain errors

        def __getattr__(self, name: str) -> Any:
            # hvd.DistributedOptimizer reads "compress" of what is given as compression=
            reason = (
                ": hvd.DistributedOptimizer takes the compressor itself, compression=compressor"
            )
            reason = reason if name == "compress" else ""
            raise AttributeError(f"CompressionState has no attribute {name!r}{reason}")

    def __getstate__(self) -> dict[str, Any]:
        logger.info("process group and parameters are not saved with a CompressionState")
        compressor = self.compressor
        given = keywords_of(compressor)
        keywords = {name: value for name, value in given.items() if keyword_of(name).picklable}
        return {
            "scheme": type(compressor),
            "keywords": keywords,
            "state": compressor.state_dict(),
            "parameters": self.session.names.saved(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        compressor = state["scheme"](**state["keywords"])
        compressor.load_state_dict(state["state"])
        self._set_up(compressor, Names([], state["parameters"]), None)


def compression_hook(
    state: CompressionState, bucket: dist.GradBucket, *others: Any
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over ranks, compressed; a hook for ``model.register_comm_hook``.

    Errors are raised from ``backward``.

    Args:
        state: The state.
        bucket: The bucket.
        *others: What FSDP1 passes, which is refused.

    Raises:
        ValueError: It was not called by DistributedDataParallel's reducer.
        RankMismatchError: Ranks differ in settings or steps.
        PayloadError: A payload arrived corrupt.
        RuntimeError: The compressor serves another model, or a state without names serves two in
            turn.

    Examples:
        >>> from hvd_adaptive import EDEN
        >>> from hvd_adaptive.ddp import CompressionState, compression_hook
        >>> model = DistributedDataParallel(net)
        >>> state = CompressionState(EDEN(bits=2), net.named_parameters())
        >>> model.register_comm_hook(state, compression_hook)
    """
    _check_call(state, bucket, others)
    session = state.session
    session.was_used = True
    session.reconnect()
    taken = Bucket.of(bucket)
    if dist.get_world_size(session.group) == 1:
        taken.future.set_result(taken.buffer)
        return taken.future
    future: torch.futures.Future[torch.Tensor] = taken.future
    if not taken.gradients:
        group: Any = session.group  # may be None
        future = allreduce_hook(group, bucket)
    session.take(taken, bucket.index(), bucket.is_last(), called_by_autograd())
    return future


def _check_call(state: Any, bucket: Any, others: Any) -> None:
    """Raise ValueError unless DistributedDataParallel's reducer calls the hook."""
    if isinstance(bucket, tuple):
        raise ValueError(
            "bucket: DistributedDataParallel's Python reducer "
            '(torch._dynamo.config.optimize_ddp="python_reducer") calls hooks inside of compiled '
            "code, without buckets; set optimize_ddp to True or False"
        )
    if others or isinstance(bucket, torch.Tensor):
        raise ValueError(
            "bucket: is a tensor, not a bucket of DistributedDataParallel; FSDP1 is not supported "
            "(use fully_shard and hvd_adaptive.fsdp.compress_reduce_scatter), and tensors are "
            "averaged by hvd_adaptive.average"
        )
    if not isinstance(state, CompressionState):
        kind = type(state).__name__
        raise ValueError(f"state: must be a CompressionState, not {kind}")
