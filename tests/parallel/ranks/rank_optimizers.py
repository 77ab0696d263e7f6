"""Horovod's optimizers as checks make them, and what a step that failed leaves to do."""

from __future__ import annotations

import contextlib

import horovod.torch as hvd
import torch


def distributed(model, compressor, lr=0.1, **keywords):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compressor,
        **keywords,
    )


def optimizer_of(parameters: dict[str, torch.Tensor], compressor, **keywords):
    """SGD with rate 1 over named parameters."""
    return hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=1.0),
        named_parameters=list(parameters.items()),
        compression=compressor,
        **keywords,
    )


def restart(optimizer) -> None:
    """Let the placeholders of the step that failed come to their end."""
    for handle, _ in optimizer._handles.values():
        hvd.synchronize(handle)
    optimizer.load_state_dict(optimizer.state_dict())
    hvd.barrier()


def drain(optimizer) -> None:
    """Wait for what a step that failed has in flight: the next test uses the names again."""
    for handle, _ in optimizer._handles.values():
        with contextlib.suppress(hvd.mpi_ops.HorovodInternalError):
            hvd.synchronize(handle)
    hvd.barrier()
