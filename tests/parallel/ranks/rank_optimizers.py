"""Horovod's optimizers as checks make them, and what a step that failed leaves to do."""

from __future__ import annotations

import contextlib

import horovod.torch as hvd
import torch


def distributed(model, compressor, lr=0.1, momentum=0.0, prefix="", **keywords):
    """SGD over the parameters of a model, or of a dict; ``prefix`` is put before their names."""
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else model.items()
    named = [(prefix + name, parameter) for name, parameter in named]
    inner = torch.optim.SGD([parameter for _, parameter in named], lr=lr, momentum=momentum)
    return hvd.DistributedOptimizer(
        inner, **{"named_parameters": named, "compression": compressor} | keywords
    )


class Training:
    """What the door of tests/nets.py makes: a stock optimizer."""

    def __init__(self, net, compressor, lr=0.1, optimizer=None, **of_ddp) -> None:
        self.model, self.optimizer = net, optimizer or distributed(net, compressor, lr=lr)

    def average(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.synchronize()

    def step(self) -> None:
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def restart(self) -> bool:
        restart(self.optimizer)
        return True


def give_up(optimizer) -> None:
    """Make Horovod forget the gradients in flight; wait for them, or it refuses their names."""
    handles = [handle for handle, _ in optimizer._handles.values()]
    optimizer.load_state_dict(optimizer.state_dict())
    for handle in handles:
        hvd.synchronize(handle)


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
