"""The compressors as a communication hook of DistributedDataParallel, over torch.distributed.

    model = DistributedDataParallel(net)
    state = CompressionState(ALQ(bits=3), model.named_parameters())
    model.register_comm_hook(state, compression_hook)

Codec, schemes, exchanges, error feedback and updates of tables are those that Horovod's optimizers
use; only the collectives differ (transport/torch_world.py). Backends: gloo and nccl.
"""

# No ``from __future__ import annotations``: DDP compares a hook's annotations with types.

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.hooks.ddp.bucket_session import BucketSession
from hvd_adaptive.hooks.ddp.buckets import Bucket, Names

logger = logging.getLogger("hvd_adaptive")

# What belongs to one process, and is not pickled.
NOT_SAVED = ("named_parameters", "process_set", "grad_scaler", "monitor")


class CompressionState:
    """What ``compression_hook`` needs from step to step: a compressor at work for one DDP model.

    Every rank ends every step with the same bits. One process alone sends nothing, and its
    gradients stay as they are. Sparse gradients, and dtypes that payloads cannot have, are averaged
    by torch.distributed's allreduce.

    compressor: serves this state alone. named_parameters: as ``model.named_parameters()`` gives
    them; parameter_bits, scope="tensor" and residuals in checkpoints find parameters by these
    names. Where None (and the compressor has none, either) they are numbered in the order of the
    first step's buckets. process_group: the model's; the default one where None.

    Pickled, as DDP's hooks are saved (``torch.save({"hook": hook, "state": state}, path)``), it
    keeps the compressor's keywords and its state: tables, step, settings, this rank's residuals.
    Process group (the default one is taken), parameters, monitor and grad_scaler are left out;
    where the latter two matter, construct all anew and load ``state.compressor.state_dict()``.
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_compressor("compressor", compressor)
        if compressor.settings.process_set is not None:
            raise ValueError(
                "process_set: is Horovod's; give CompressionState the model's process_group"
            )
        if compressor.connection is not None:
            raise ValueError("compressor: serves an optimizer or a model already; make another")
        if named_parameters is None:
            named_parameters = compressor.settings.named_parameters
        given = [] if named_parameters is None else list(named_parameters)
        if given:
            compressor.know_parameters([name for name, _ in given])
        self._set_up(compressor, Names(given), process_group)

    def _set_up(
        self,
        compressor: GradientCompressor,
        names: Names,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.compressor = compressor
        self.session = BucketSession(compressor, names, process_group)
        compressor.attach(self.session)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The model's; the default one where None."""
        return self.session.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        self._set_up(self.compressor, self.session.names, group)

    def __getstate__(self) -> dict[str, Any]:
        logger.info("process group and parameters are not saved with a CompressionState")
        compressor = self.compressor
        keywords = {n: v for n, v in compressor._constructed.items() if n not in NOT_SAVED}
        if "update_steps" in keywords:  # what could be read only once has been read
            keywords["update_steps"] = compressor.schedule.planned
        return {
            "scheme": type(compressor),
            "keywords": keywords,
            "state": compressor.state_dict(),
            "parameters": self.session.names.numbered,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        compressor = state["scheme"](**state["keywords"])
        compressor.load_state_dict(state["state"])
        self._set_up(compressor, Names([], state["parameters"]), None)


def compression_hook(
    state: CompressionState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over ranks, compressed: for ``model.register_comm_hook``.

    Raises, from ``backward``, RankMismatchError where ranks differ in settings or steps, and
    PayloadError where a payload arrived corrupt.
    """
    session = state.session
    if state.compressor.connection is None:  # it was closed
        state.compressor.attach(session)
    if state.compressor.connection is not session:
        raise RuntimeError("one compressor serves one model, but this one was given to another")
    taken = Bucket.of(bucket)
    if dist.get_world_size(session.group) == 1:
        taken.future.set_result(taken.buffer)
        return taken.future
    session.take(bucket.index(), taken)
    future = taken.future
    if not taken.gradients:
        group: Any = session.group  # may be None
        future = allreduce_hook(group, bucket)
    if bucket.is_last():
        session.finish()
    return future
