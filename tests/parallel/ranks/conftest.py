"""Fixtures of the tests that run on every rank at once."""

from __future__ import annotations

import gc
import os
import sys

import horovod.torch as hvd
import pytest
import torch
from training import Training, begin

from hvd_adaptive import instances

MANY_RANKS, SHARE, SHARE_OF_TWO = 4, 8, 6
ALL = "HVD_ADAPTIVE_EVERY_CASE"  # `make ranks` sets it


@pytest.fixture(scope="session", autouse=True)
def world():
    begin()
    # A test process holds a million objects, among which some checks look for an optimizer's.
    gc.freeze()
    yield hvd
    hvd.shutdown()


@pytest.fixture(autouse=True)
def first_compressors():
    """Each test's first compressor has the random numbers of a process's first one, and what a test
    initialises at random is the same on all ranks."""
    instances.start_over()
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
