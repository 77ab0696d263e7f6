"""FSDP2 over gloo: trainings, their states, and what stops or warns."""

from __future__ import annotations

import copy
import gc
import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from damage import flipped, truncated
from ddp_oracles import assert_same_everywhere
from fsdp_nets import FINE, RANK, assert_close, backward, exact, make, sharded, stepped, whole
from states import through_disk
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvd_adaptive import ALQ, EDEN, QSGD, Monitor, PayloadError, RankMismatchError, instances
from hvd_adaptive.fsdp import compress_all_reduce, compress_reduce_scatter
from hvd_adaptive.hooks.fsdp.session import UNFINISHED, UNUSED
from hvd_adaptive.transport.collectives import AllToAll, EqualParts

RANKS = dist.get_world_size()
REPLICA_STEPS = 50


def train(model, optimizer, steps) -> torch.Tensor:
    """The last loss."""
    for step in steps:
        optimizer.zero_grad()
        loss = backward(model, step)
        optimizer.step()
    return loss


@pytest.mark.parametrize("way", ["own", "dcp", "replicas"])
def test_a_run_resumes(way, tmp_path_factory):
    """Bit for bit, from each rank's own file and from a distributed checkpoint, which has a state
    for each of several replicas."""
    if way == "replicas" and RANKS != 4:
        return
    shape, names = (2, 2) if way == "replicas" else (1, RANKS), ("nodes", "shards")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    folder = [str(tmp_path_factory.mktemp("dcp")) if RANK == 0 else None]
    dist.broadcast_object_list(folder)

    def made():
        instances.start_over()
        model = sharded(make(), mesh=mesh if way == "replicas" else mesh["shards"])
        compressor = ALQ(bits=3, bucket_size=256, update_steps=[0, 3])
        compressed = compress_reduce_scatter(model, compressor)
        return model, compressed, torch.optim.SGD(model.parameters(), 0.1)

    def finished(model, optimizer):
        train(model, optimizer, range(2, 6))
        return [p.to_local().clone() for p in model.parameters()]

    model, compressed, optimizer = made()
    train(model, optimizer, range(2))
    state = {"model": model.state_dict(), "compression": compressed.state_dict()}
    dcp.save(state, checkpoint_id=folder[0])
    saved = copy.deepcopy(model.state_dict())
    own = through_disk(compressed.compressor.state_dict())
    expected = finished(model, optimizer)
    model, compressed, optimizer = made()
    if way == "own":
        model.load_state_dict(saved)
        compressed.compressor.load_state_dict(own)
    else:
        state = {"model": model.state_dict(), "compression": compressed.state_dict()}
        dcp.load(state, checkpoint_id=folder[0])
        model.load_state_dict(state["model"])
        compressed.load_state_dict(state["compression"])
    assert compressed.compressor.step == 2
    assert all(map(torch.equal, finished(model, optimizer), expected))


@pytest.mark.parametrize("alone", [False, True])
def test_another_mesh_loads_the_first_state(alone):
    """Each replica has tables of its own, which ranks that now exchange must not mix, also if the
    first module is not sharded."""
    if RANKS != 4:
        return
    each = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ranks", "self"))["self"]

    def made(*shape: int):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "shards"))
        model = sharded(make(), mesh=mesh)
        if alone:
            model = nn.Sequential(fully_shard(nn.Linear(40, 40), mesh=each), model)
        compressor = ALQ(bits=3, bucket_size=256, update_steps=[0, 3])
        return model, compress_reduce_scatter(model, compressor)

    def tables(compressed) -> list[torch.Tensor]:
        everyone: list = [None] * RANKS
        dist.all_gather_object(everyone, compressed.compressor.levels)
        return everyone

    model, compressed = made(2, 2)
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(2))
    state, (first, _, other, _) = compressed.state_dict(), tables(compressed)
    assert not torch.equal(first, other)
    for shape in ((1, 4), (4, 1)):
        _, compressed = made(*shape)
        compressed.load_state_dict(state)
        assert all(torch.equal(first, levels) for levels in tables(compressed))


class Words(nn.Module):
    """A table of which half the rows are used, and a layer whose rows no number of ranks divides:
    FSDP2 fills its shards up with zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(400, 40), nn.Linear(40, 33)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(words))


@pytest.mark.parametrize("door", ["shards", "replicas"])
@pytest.mark.parametrize("words", [40, 400])
def test_rounded_zeros_are_told_of_once(words, door, caplog):
    """After the warm-up, with the module's name; padding is no gradient."""
    model = Words()
    inside = RANKS if door == "shards" else RANKS // 2
    mesh = init_device_mesh("cpu", (RANKS // inside, inside), mesh_dim_names=("nodes", "shards"))
    for layer in (model.table, model.layer):
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    compressor = EDEN(bits=2, warmup_steps=1, bucket_size=256, min_numel=100)
    if door == "shards":
        compressed = compress_reduce_scatter(model, compressor)
    else:
        compressed = compress_all_reduce(model, compressor, mesh["nodes"].get_group())
    told = []
    for _ in range(3):
        model.zero_grad()
        model(torch.arange(words)).square().sum().backward()
        compressed.finish()
        told.append([m for m in caplog.messages if "exactly zero" in m])
    assert not told[0] and told[1] == told[2]
    # Of 2 shards of a table of which a tenth is used, the second is zero throughout.
    tells = words == 40 and RANK == 0
    assert len(told[1]) == int(tells)
    if tells:
        share = 80 if door == "replicas" and inside > 1 else 90
        assert "exactly zero, and this scheme rounds zeros" in told[1][0]
        assert f": 'table' ({share}%);" in told[1][0] and "{'table': None}" in told[1][0]


@pytest.mark.parametrize("how", [truncated, flipped])
@pytest.mark.parametrize("lengths", ["equal", "that vary"])
@pytest.mark.parametrize("form", ["step", "positional", "keyword"])
def test_a_corrupt_payload_stops_all_ranks(how, lengths, form, monkeypatch):
    """Before the optimizer's step, also in its closure; the next step works."""
    net = make()
    model = sharded(net)
    compressor = QSGD(**FINE, coding="fixed" if lengths == "equal" else "elias")
    compress_reduce_scatter(model, compressor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collective, turn = EqualParts if lengths == "equal" else AllToAll, []
    receive = collective.receive

    def damaged(self, world, handle):
        parts = receive(self, world, handle)
        turn.append(1)
        if RANK == RANKS - 1 and len(turn) == 2:
            parts[0] = how(parts[0].clone())
        return parts

    monkeypatch.setattr(collective, "receive", damaged)

    def closure():
        optimizer.zero_grad()
        with torch.enable_grad():
            return backward(model, 0)

    if form == "step":
        closure()
    with pytest.raises(PayloadError, match=rf"corrupt at rank {RANKS - 1} \("):
        if form == "keyword":
            optimizer.step(closure=closure)
        else:
            optimizer.step(*([closure] if form == "positional" else []))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), dict(net.named_parameters())[name]), name
    assert compressor.step == 0
    if form == "step":
        train(model, optimizer, [0])
    else:
        assert optimizer.step(closure) > 0
    assert_close(whole(model), exact(net, 0))
    assert compressor.step == 1


@pytest.mark.parametrize("differs", ["steps_that_differ", "settings"])
def test_ranks_that_differ(differs):
    model, first = sharded(make()), RANK == 0
    compressor = QSGD(bits=4 + (first and differs == "settings"))
    compressed = compress_reduce_scatter(model, compressor)
    told = "bits is 5 on rank 0, 4 on rank"
    if differs != "settings":
        told = "the step: its number is 7 on rank 0, 0 on rank"
        compressor.load_state_dict(compressor.state_dict() | {"step": 7 * first})
    with pytest.raises(RankMismatchError, match=told):
        stepped(model, compressed, 0)


@pytest.mark.parametrize(
    ("name", "value", "door"),
    [
        ("bits", 6, "shards"),
        ("bits", 6, "replicas"),
        ("warmup_steps", 1, "shards"),  # this rank exchanges lengths
        ("warmup_steps", 9, "shards"),
        ("seed", 5, "shards"),
    ],
)
def test_one_rank_alone_changes_a_setting(name, value, door):
    """Nothing is sent, because lengths would differ. Once ranks agree, the model goes on."""
    net = make()
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("nodes", "shards"))
    model = sharded(net) if door == "shards" else sharded(net, mesh=mesh["shards"])
    compressor = ALQ(bits=8, bucket_size=128)
    if door == "shards":
        compressed = compress_reduce_scatter(model, compressor)
    else:
        compressed = compress_all_reduce(model, compressor, mesh["nodes"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, optimizer, [0])
    if RANK == RANKS - 1:
        compressor.set(**{name: value})
    with pytest.raises(RankMismatchError, match=rf"settings: {name} is .*, {value} on rank"):
        backward(model, 1)
    compressed.finish()
    assert compressor.step == 1
    if RANK < RANKS - 1:
        compressor.set(**{name: value})
    for step in (1, 2):
        train(model, optimizer, [step])
        assert_close(whole(model), exact(net, step), 0.1)
    assert compressor.step == 3


def test_report_and_monitor(tmp_path):
    model = sharded(make())
    monitor = Monitor(tmp_path / "all.jsonl", every=1, ranks="all")
    compressor = QSGD(bits=4, bucket_size=128, monitor=monitor)
    compressed = compress_reduce_scatter(model, compressor)
    for step in range(2):
        stepped(model, compressed, step)
    report = compressed.report()
    sizes = [group.coordinates for group in compressor._training.connection.layout.groups]
    assert report["coordinates"] == sum(sizes) and report["exchange"] == "reduce_scatter"
    assert 0 < report["wire_bytes"] < report["payload_bytes"] <= report["uncompressed_bytes"]
    assert report["payload_bytes"] * (RANKS - 1) == pytest.approx(report["wire_bytes"] * RANKS)
    assert 0 < report["relative_error"] < 1 and report["encode_s"] > 0 and report["decode_s"] > 0
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    start = next(line for line in lines if line["kind"] == "start")
    names = [member[0] for group in start["groups"] for member in group["members"]]
    assert names == ["root", "first", "second", "last", "spare"]
    assert lines[-1]["wire_bytes"] == report["wire_bytes"]
    for bits, more in ((8, True), (2, False)):
        compressor.set(bits=bits)
        stepped(model, compressed, 2)
        assert (compressed.report()["wire_bytes"] > report["wire_bytes"]) == more


SCHEMES = {
    "alq": lambda: ALQ(bits=8, bucket_size=128),
    "scatter_reduce": lambda: ALQ(bits=8, bucket_size=128, exchange="scatter_reduce"),
    "eden": lambda: EDEN(bits=8),
}


@pytest.mark.parametrize("name", [None, *SCHEMES])
def test_replicas(name):
    """HSDP: FSDP's own all-reduce after a compressed reduce-scatter; or a 1-D mesh within a node,
    and averages in codes between nodes. Shards are equal bit for bit."""
    if name is None and RANKS != 4:
        return
    inside = 2 if RANKS == 4 else 1
    mesh = init_device_mesh("cpu", (RANKS // inside, inside), mesh_dim_names=("nodes", "shards"))
    net = make()
    model = sharded(net, mesh=mesh if name is None else mesh["shards"])
    if name is None:
        compressed = compress_reduce_scatter(model, QSGD(**FINE))
    else:
        compressed = compress_all_reduce(model, SCHEMES[name](), mesh["nodes"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, [0])
    assert_close(whole(model), exact(net, 0), 0.02 if name is None else 0.05)
    train(model, optimizer, range(1, REPLICA_STEPS))
    assert compressed.compressor.step == REPLICA_STEPS
    assert_same_everywhere(*(p.full_tensor() for p in model.parameters()))


def test_an_all_reduce_of_different_shards_is_refused():
    """Before the compressor serves the model."""
    model, compressor = sharded(make()), QSGD(**FINE)
    with pytest.raises(ValueError, match=r"group: ranks? .* of it and this rank hold different sh"):
        compress_all_reduce(model, compressor, dist.group.WORLD)
    compress_reduce_scatter(model, compressor).finish()


@pytest.mark.parametrize("seen", ["report", "end"])
def test_steps_that_nobody_finishes(seen, freed, said):
    """A warning, once; none after a step."""
    model = sharded(make())
    compressed = compress_reduce_scatter(model, QSGD(**FINE))
    for step in range(2):
        backward(model, step)
    if seen == "report":
        compressed.report()
        compressed.finish()
        backward(model, 2)
        compressed.report()
    del compressed, model
    gc.collect()
    assert len(said(UNFINISHED)) == int(RANK == 0)
    assert not said(UNUSED)


@pytest.mark.parametrize("seen", ["report", "state_dict", "end", "trained"])
def test_a_model_that_nobody_trains(seen, freed, said):
    """A warning, once, if the copy is trained that has no compressor; none in state_dict()."""
    model, compressor = sharded(make()), QSGD(**FINE)
    compressed = compress_reduce_scatter(
        model if seen == "trained" else sharded(make()), compressor
    )
    stepped(model, compressed, 0)
    if seen in ("report", "trained"):
        compressor.report()
        compressor.report()
    if seen == "state_dict":
        compressed.state_dict()
        assert not said(UNUSED)
    del compressed, model
    gc.collect()
    assert len(said(UNUSED)) == int(seen != "trained" and RANK == 0)
