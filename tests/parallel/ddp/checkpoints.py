"""Train with DDP, save a distributed checkpoint half way, go on; or load it and go on.

test_distributed_checkpoint.py runs: python checkpoints.py FOLDER whole|rest|more
"""

from __future__ import annotations

import hashlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_oracles import assert_same_everywhere, backward, make_net, wrap
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from hvd_adaptive import ALQ

HALF, STEPS = 4, 7


def made():
    """A model whose buckets stay the same, and its training."""
    net = make_net()
    compressor = ALQ(bits=2, bucket_size=256, error_feedback=0.5, update_steps=[0, 3, 5])
    model, state = wrap(net, compressor, bucket_cap_mb=0.05, find_unused_parameters=True)
    return model, state, torch.optim.SGD(net.parameters(), lr=0.1)


def train(model, optimizer, steps):
    for step in steps:
        backward(model, step)
        optimizer.step()


def report(model, state):
    """A hash of parameters and residuals."""
    parameters = [p.detach().reshape(-1) for p in model.parameters()]
    assert_same_everywhere(parameters)
    residuals = state.compressor.state_dict()["residuals"]["parameters"]
    whole = torch.cat([*parameters, *(residuals[name] for name in sorted(residuals))])
    digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    print(f"rank={dist.get_rank()} step={state.compressor.step} hash={digest}", flush=True)


def whole(folder):
    """The uninterrupted run; keys are those of a state that has taken no step."""
    model, state, optimizer = made()
    keys = list(state.state_dict())
    train(model, optimizer, range(HALF))
    assert list(state.state_dict()) == keys
    dcp.save({"model": model, "compression": state}, checkpoint_id=folder / "state")
    plain = {"compressor": state.compressor.state_dict()}
    dcp.save(plain, checkpoint_id=folder / "plain")
    for again in (plain, {"compressor": made()[1].compressor.state_dict()}):
        dcp.load(again, checkpoint_id=folder / "plain")
        with pytest.raises(ValueError, match="residuals are missing, or of several ranks"):
            state.compressor.load_state_dict(again["compressor"])
    train(model, optimizer, range(HALF, STEPS))
    report(model, state)


def rest(folder):
    """The resumed one."""
    model, state, optimizer = made()
    dcp.load({"model": model, "compression": state}, checkpoint_id=folder / "state")
    assert state.compressor.step == HALF
    train(model, optimizer, range(HALF, STEPS))
    report(model, state)


def more(folder):
    """Among more ranks: refused, or tables and step without residuals."""
    model, state, optimizer = made()
    parts = {"model": model, "compression": state}
    with pytest.raises(dcp.CheckpointException, match=r"Missing key .* compression\.rank . of 3"):
        dcp.load(parts, checkpoint_id=folder / "state")
    assert state.compressor.step == 0
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(parts, checkpoint_id=folder / "state", planner=planner)
    assert state.compressor.step == HALF and state.compressor.codec.table_version == 2
    assert "residuals" not in state.compressor.state_dict()
    train(model, optimizer, range(HALF, STEPS))
    report(model, state)


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, part = Path(sys.argv[1]), sys.argv[2]
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    store = dist.FileStore(str(place / part / "store"), size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    {"whole": whole, "rest": rest, "more": more}[part](place)
    dist.destroy_process_group()
