"""Train by DDP, average() and LocalSGD, save distributed checkpoints half way, go on; or load them
and go on.

test_resume.py runs: python checkpoints.py FOLDER whole|rest|more
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_oracles import assert_same_everywhere, backward, make_net, wrap
from nets import hash_of
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from hvd_adaptive import ALQ, LocalSGD, average
from hvd_adaptive.checkpoint import PerRank

HALF, STEPS = 4, 7


def compressor():
    return ALQ(bits=2, bucket_size=256, error_feedback=0.5, update_steps=[0, 3, 5])


class Ddp:
    """A model whose buckets stay the same, and its training."""

    def __init__(self):
        self.model = self.net = make_net()
        self.compressor = compressor()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.prepare()

    def prepare(self):
        options = {"bucket_cap_mb": 0.05, "find_unused_parameters": True}
        self.model, state = wrap(self.net, self.compressor, **options)
        self.parts = {"model": self.model, "compression": state}

    def train(self, steps):
        for step in steps:
            backward(self.model, step)
            self.reduce()
            self.optimizer.step()

    def reduce(self):
        """DDP has averaged."""

    def finish(self):
        """All ranks are equal."""


class Average(Ddp):
    """A loop that reduces gradients by hand."""

    def prepare(self):
        self.parts = {"model": self.net, "compression": PerRank(compressor=self.compressor)}

    def reduce(self):
        gradients = [p.grad for p in self.net.parameters()]
        for parameter, gradient in zip(
            self.net.parameters(), average(gradients, self.compressor), strict=True
        ):
            parameter.grad = gradient


class Local(Ddp):
    """Ranks that differ when the checkpoint is saved, with a round in flight."""

    def prepare(self):
        inner = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.5)
        streams = {"every": 4, "fragments": 2, "delay": 1, "momentum": 0.5, "lr": 0.5}
        self.optimizer = LocalSGD(inner, compression=self.compressor, **streams)
        self.parts = {"local": PerRank(model=self.net, optimizer=self.optimizer)}

    def finish(self):
        self.optimizer.finish()


DOORS = {"ddp": Ddp, "average": Average, "local": Local}


def report(name, training):
    training.finish()
    assert_same_everywhere(training.net)
    residuals = training.compressor.state_dict()["residuals"]["parameters"]
    digest = hash_of(training.net, *(residuals[name] for name in sorted(residuals)))
    print(f"{name} rank={dist.get_rank()} hash={digest}", flush=True)


def whole(folder):
    """The uninterrupted run; keys are those of a state that has taken no step."""
    for name, make in DOORS.items():
        training = make()
        keys = {part: list(of.state_dict()) for part, of in training.parts.items()}
        training.train(range(HALF))
        assert keys == {part: list(of.state_dict()) for part, of in training.parts.items()}
        dcp.save(training.parts, checkpoint_id=folder / name)
        if name == "local":
            mixed_up(training.optimizer, folder / "plain")
        training.train(range(HALF, STEPS))
        report(name, training)


def mixed_up(optimizer, folder):
    """States that a checkpoint would mix up, or lose, are refused, also without a compressor.
    (tests/unit/test_feedback_state.py mixes residuals up.)"""
    state = optimizer.state_dict()
    assert state["pending"] is not None
    net = make_net()
    plain = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5), every=4)
    backward(net, 0)
    plain.step()
    dcp.save({"optimizer": plain}, checkpoint_id=folder)
    with pytest.raises(ValueError, match=r"lost, or of several ranks.* PerRank"):
        dcp.load({"optimizer": plain}, checkpoint_id=folder)
    others = [None] * dist.get_world_size()
    dist.all_gather_object(others, plain.state_dict())
    with pytest.raises(ValueError, match=r"saved it within a round, and this is rank .* PerRank"):
        plain.load_state_dict(others[dist.get_rank() - 1])
    plain.load_state_dict(others[dist.get_rank()])
    lost = others[dist.get_rank()]
    lost["optimizer"]["state"].clear()  # as a new optimizer's, which dcp.load leaves so
    with pytest.raises(ValueError, match=r"the optimizer's state is lost"):
        plain.load_state_dict(lost)


def rest(folder):
    for name, make in DOORS.items():
        training = make()
        dcp.load(training.parts, checkpoint_id=folder / name)
        assert training.compressor.step == (2 if name == "local" else HALF)
        training.train(range(HALF, STEPS))
        report(name, training)


def more(folder):
    """Among more ranks: refused; DDP's may be loaded without residuals."""
    refused = r"Missing key .* (compression|local)\.rank . of 3"
    for name, make in DOORS.items():
        training = make()
        with pytest.raises(dcp.CheckpointException, match=refused):
            dcp.load(training.parts, checkpoint_id=folder / name)
        assert training.compressor.step == 0
    training = Ddp()
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(training.parts, checkpoint_id=folder / "ddp", planner=planner)
    assert training.compressor.step == HALF and training.compressor.parts.default.table_version == 2
    assert "residuals" not in training.compressor.state_dict()
    training.train(range(HALF, STEPS))
    report("ddp", training)


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, part = Path(sys.argv[1]), sys.argv[2]
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    store = dist.FileStore(str(place / part / "store"), size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    {"whole": whole, "rest": rest, "more": more}[part](place)
    dist.destroy_process_group()
