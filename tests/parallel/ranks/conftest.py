"""Fixtures of the tests that run on every rank at once."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops
from rank_optimizers import Training

from hvd_adaptive import instances, simulate
from hvd_adaptive.exchange import auto

torch.set_num_threads(1)
# Checks that do not name an exchange are of "allgather", on any number of ranks.
auto.FEW_RANKS = 2**31
MANY_RANKS, SHARE, SHARE_OF_TWO = 4, 8, 6
PAUSE = 1e-4  # seconds: a tenth of a cycle of Horovod
ALL = "HVD_ADAPTIVE_EVERY_CASE"  # `make ranks` sets it


@pytest.fixture(scope="session", autouse=True)
def world():
    """Horovod, initialised once; tests may make process sets."""
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    hvd.init()
    if hvd.gloo_enabled():
        rest_while_waiting()
    # A test process holds a million objects, among which some checks look for an optimizer's.
    gc.freeze()
    yield hvd
    hvd.shutdown()


def rest_while_waiting() -> None:
    """Let waits for a collective sleep. Horovod's own spins, which takes the cores from its own
    threads that work over Gloo, where there are few: checks take twice as long."""
    lib = mpi_ops.mpi_lib
    wait = lib.horovod_torch_wait_and_clear

    def resting(handle: int) -> object:
        while not lib.horovod_torch_poll(handle):
            time.sleep(PAUSE)
        return wait(handle)

    lib.horovod_torch_wait_and_clear = resting


@pytest.fixture(autouse=True)
def first_compressors():
    """Each test's first compressor has the random numbers of a process's first one."""
    instances.start_over()


@pytest.fixture(autouse=True)
def same_initial_weights():
    """What a test initialises at random is the same on all ranks."""
    torch.manual_seed(0)


@pytest.fixture
def door():
    return Training


@pytest.fixture
def rank():
    return hvd.rank()


@pytest.fixture
def ranks():
    return hvd.size()


@pytest.fixture
def gather():
    """The program's own collective: all ranks' tensors, stacked."""
    return lambda tensor: hvd.allgather(tensor[None].contiguous(), name="gathered")


@pytest.fixture
def meet():
    return lambda: hvd.allreduce(torch.ones(1), name="meet")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each check, two ranks over MPI take one case in six, at least one. Four ranks take one in
    eight of the checks marked ``ranks``, and all of those marked ``nodes``; two ranks over Gloo
    take one in eight of those marked ``gloo``.

    Checks of stock's backward pass come first, since its collectives are named by their numbers on
    each rank. Those of hvd.join() follow: another check may leave a collective that one rank alone
    has submitted; once that rank joins, Horovod 0.28.1 performs it on the others, and crashes."""
    first = ("check_join", "check_backward")
    items.sort(key=lambda item: -first.index(item.path.stem) if item.path.stem in first else 1)
    if ALL in os.environ:
        return
    gloo = os.environ.get("HOROVOD_CONTROLLER") == "gloo"
    many = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) >= MANY_RANKS
    mark = "gloo" if gloo else "ranks" if many else None
    cases: dict[tuple[object, str], list[pytest.Item]] = {}
    chosen = set()
    for item in items:
        if many and item.get_closest_marker("nodes"):
            chosen.add(item)
        elif mark is None or item.get_closest_marker(mark):
            cases.setdefault((item.path, item.originalname), []).append(item)
    for place, of_check in enumerate(cases.values()):
        share = min(len(of_check), SHARE_OF_TWO if mark is None else SHARE)
        chosen.update(item for i, item in enumerate(of_check) if (i + place + gloo) % share == 0)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """One rank's failure ends the job: the others would wait for it."""
    if report.failed:
        rank = hvd.rank() if hvd.is_initialized() else "?"
        print(f"rank {rank}: {report.nodeid}\n{report.longreprtext}", flush=True)
        sys.stdout.flush()
        os._exit(1)


def wait_for(happened: Callable[[], object]) -> None:
    """Return once ``happened()`` is true, which a worker's thread may bring about."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def make_model(seed: int = 0, width: int = 300) -> torch.nn.Module:
    """A small network, the same on all ranks."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(100, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 100),
        torch.nn.ReLU(),
        torch.nn.Linear(100, 10),
    )


def batches(rank: int, seed: int = 0) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A rank's own endless data of a linear teacher."""
    teacher = torch.randn(100, 10, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(1000 * seed + rank)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, 100, generator=generator)
        return x, (x @ teacher).argmax(1)

    return batch


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0):
    """Plain training; returns the losses."""
    batch, losses = batches(hvd.rank(), seed), []
    for _ in range(steps):
        x, y = batch()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def simulated(construct, steps: int, lr: float, momentum: float = 0.0):
    """The model of ``train``, half of whose first layer is dead, and its compressor, trained by all
    ranks in this process."""
    sources = [batches(rank) for rank in range(hvd.size())]
    model, compressor = make_model(), construct()
    model[0].bias.data[:150] = -1e3
    simulate.train(
        model,
        lambda rank, step: sources[rank](),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum),
        compressor=compressor,
        workers=hvd.size(),
        steps=steps,
        progress=False,
    )
    return model, compressor


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 16) -> float:
    """Train on one batch a rank; what is left of the loss (last over first), mean of all ranks.

    Sixteen steps at a rate of 0.5 in full precision leave 0.07 on two ranks and 0.32 on four.
    """
    x, y = batches(hvd.rank())()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(hvd.allreduce(losses[-1] / losses[0], name="learn"))


def flat_parameters(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_same_everywhere(tensor: torch.Tensor, name: str) -> None:
    """Bitwise equality over all ranks, by a digest: the ranks' tensors may be large."""
    bits = tensor.detach().contiguous().view(torch.int32)
    told = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    told.update(bits.numpy())
    own = torch.tensor(list(told.digest()), dtype=torch.uint8)
    gathered = hvd.allgather(own[None], name=f"check.{name}")
    for rank in range(hvd.size()):
        assert torch.equal(gathered[rank], own), f"rank {rank} differs"
