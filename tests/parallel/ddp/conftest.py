"""Fixtures of the checks of DistributedDataParallel."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from ddp_oracles import Training, gathered

from hvd_adaptive.hooks.ddp.early import EarlyGroups
from hvd_adaptive.transport.torch_world import TorchWorld

FOLDER = Path(__file__).parent
SHARE = 3


@pytest.fixture(autouse=True)
def groups_are_left(monkeypatch):
    """Leave the process groups that a check has made to the next one: each has a thread of Gloo."""
    made, construct = [], TorchWorld.__init__

    def recorded(world, *arguments, **keywords):
        construct(world, *arguments, **keywords)
        made.append(world)

    monkeypatch.setattr(TorchWorld, "__init__", recorded)
    yield
    for world in made:
        world.close()


@pytest.fixture
def freed():
    """Models of earlier checks are freed, and have warned."""
    gc.collect()


@pytest.fixture
def door():
    return Training


@pytest.fixture
def rank():
    return dist.get_rank()


@pytest.fixture
def ranks():
    return dist.get_world_size()


@pytest.fixture
def gather():
    """The program's own collective: all ranks' tensors, stacked."""
    return gathered


@pytest.fixture
def meet():
    return dist.barrier


@pytest.fixture
def sent(monkeypatch):
    """The groups that were handed over before their bucket was full."""
    sent: list[int] = []
    send = EarlyGroups._send

    def recorded(early, group):
        sent.append(group)
        send(early, group)

    monkeypatch.setattr(EarlyGroups, "_send", recorded)
    return sent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take one case of each check in ``SHARE``, at least one, unless every case is wanted.

    A run of the whole suite also calls this, with the items of all folders.
    """
    if "HVD_ADAPTIVE_EVERY_CASE" in os.environ:
        return
    cases: dict[tuple[object, str], list[pytest.Item]] = {}
    for item in items:
        if item.path.parent != FOLDER:
            continue
        cases.setdefault((item.path, item.originalname), []).append(item)
    left = {
        item
        for place, of_check in enumerate(cases.values())
        for index, item in enumerate(of_check)
        if (index + place) % min(len(of_check), SHARE)
    }
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]
