"""Trainings by stock Horovod's optimizers, for the checks and programs that run on every rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops
from nets import flat_parameters, hash_of
from scheme_cases import scheme
from torch import nn

from hvd_adaptive import simulate
from hvd_adaptive.exchange import auto

__all__ = ["flat_parameters", "hash_of"]
torch.set_num_threads(1)
# Checks that do not name an exchange are of "allgather", on any number of ranks.
auto.FEW_RANKS = 2**31
PAUSE = 1e-4  # seconds: a tenth of a cycle of Horovod
BUCKET = 64
# Buckets of one value come back exactly, but for ECDQ's dither.
SCHEMES = {
    "alq": scheme("alq-4", update_steps=[0]),
    "qsgd": scheme("qsgd-4-linf"),
    "bingrad": scheme("bingrad"),
    "feedback": scheme("bingrad-biased", error_feedback=1.0),
    "ecdq": scheme("ecdq-variance0.0001", update_steps=[0]),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def begin() -> None:
    """Initialise Horovod; process sets may be made later."""
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    hvd.init()
    if hvd.gloo_enabled():
        _rest_while_waiting()


def _rest_while_waiting() -> None:
    """Let waits for a collective sleep. Horovod's own spins, which takes the cores from its own
    threads that work over Gloo, where there are few: checks take twice as long."""
    lib = mpi_ops.mpi_lib
    wait = lib.horovod_torch_wait_and_clear

    def resting(handle: int) -> object:
        while not lib.horovod_torch_poll(handle):
            time.sleep(PAUSE)
        return wait(handle)

    lib.horovod_torch_wait_and_clear = resting


def make(scheme: str, **keywords):
    return SCHEMES[scheme](**{"bucket_size": BUCKET, "min_numel": 2} | keywords)


def make_model(seed: int = 0, width: int = 300, dead: int = 0) -> nn.Module:
    """A small network, the same on all ranks; so many units of its first layer are dead."""
    torch.manual_seed(seed)
    first, second, last = nn.Linear(100, width), nn.Linear(width, 100), nn.Linear(100, 10)
    first.bias.data[:dead] = -1e3
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def distributed(model, compressor, lr=0.1, momentum=0.0, prefix="", **keywords):
    """SGD over the parameters of a model, or of a dict; ``prefix`` is put before their names."""
    named = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    named = [(prefix + name, parameter) for name, parameter in named]
    inner = torch.optim.SGD([parameter for _, parameter in named], lr=lr, momentum=momentum)
    return hvd.DistributedOptimizer(
        inner, **{"named_parameters": named, "compression": compressor} | keywords
    )


def batches(rank: int, seed: int = 0) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A rank's own endless data of a linear teacher."""
    teacher = torch.randn(100, 10, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(1000 * seed + rank)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, 100, generator=generator)
        return x, (x @ teacher).argmax(1)

    return batch


def loss_of(model, batch) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def take_step(optimizer, loss: torch.Tensor) -> None:
    """The averages stay in the gradients."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(model, optimizer, steps: int, seed: int = 0) -> None:
    batch = batches(hvd.rank(), seed)
    for _ in range(steps):
        take_step(optimizer, loss_of(model, batch()))


def trained(compressor, steps: int):
    model = make_model()
    optimizer = distributed(model, compressor)
    train(model, optimizer, steps)
    return model, optimizer


def learn(model, optimizer, steps: int = 16) -> float:
    """Train on one batch a rank; what is left of the loss (last over first), mean of all ranks.

    Sixteen steps at a rate of 0.5 in full precision leave 0.07 on two ranks and 0.32 on four.
    """
    batch, losses = batches(hvd.rank())(), []
    for _ in range(steps):
        losses.append(loss_of(model, batch))
        take_step(optimizer, losses[-1])
    return float(hvd.allreduce((losses[-1] / losses[0]).detach(), name="learn"))


def simulated(construct, steps: int, lr: float):
    """The model of ``train``, half of whose first layer is dead, and its compressor, trained by all
    ranks in this process."""
    sources = [batches(rank) for rank in range(hvd.size())]
    model, compressor = make_model(dead=150), construct()
    simulate.train(
        model,
        lambda rank, step: sources[rank](),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        compressor=compressor,
        workers=hvd.size(),
        steps=steps,
        progress=False,
    )
    return model, compressor


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


def drain(optimizer) -> None:
    """Let what a step that failed has in flight come to its end: its names are used again."""
    for handle, _ in optimizer._handles.values():
        with contextlib.suppress(mpi_ops.HorovodInternalError):
            hvd.synchronize(handle)


def restart(optimizer) -> None:
    drain(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    hvd.barrier()


def wait_for(happened: Callable[[], object]) -> None:
    """Return once ``happened()`` is true, which a worker's thread may bring about."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def residuals_of(compressor) -> dict[str, torch.Tensor]:
    return compressor.state_dict().get("residuals", {}).get("parameters", {})


def mean(tensor: torch.Tensor, **where) -> torch.Tensor:
    """Of all ranks (of a process set), in float64."""
    own = tensor.detach().double()[None].contiguous()
    return hvd.allgather(own, name="mean", **where).mean(dim=0)


def assert_average(gradient: torch.Tensor, value: float) -> None:
    """All coordinates are ``value``, within the rounding of bfloat16 and half a step of ECDQ's."""
    expected = torch.full(gradient.shape, value, dtype=torch.float64)
    torch.testing.assert_close(gradient.double(), expected, rtol=0.03, atol=0.0)


def assert_same_everywhere(*parts: torch.Tensor | nn.Module, **where) -> None:
    """Bit for bit, on all ranks (of a process set); a module stands for its parameters."""
    own = torch.tensor(list(hash_of(*parts).encode()), dtype=torch.uint8)
    for rank, other in enumerate(hvd.allgather(own[None], name="same", **where)):
        assert torch.equal(other, own), f"rank {rank} differs"
