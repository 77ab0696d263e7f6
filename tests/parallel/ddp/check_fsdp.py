"""FSDP2 over gloo: gradients against exact ones of a plain model, and what a training needs."""

from __future__ import annotations

import copy
import gc
import io
import json
import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from damage import flipped, truncated
from ddp_oracles import assert_same_everywhere, gathered
from list_averages import UNBIASED
from scheme_cases import scheme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hvd_adaptive import ALQ, EDEN, QSGD, Monitor, PayloadError, RankMismatchError, instances
from hvd_adaptive.fsdp import compress_all_reduce, compress_reduce_scatter
from hvd_adaptive.hooks.fsdp.session import UNUSED
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.transport.collectives import AllToAll, EqualParts

RANK, RANKS = dist.get_rank(), dist.get_world_size()
FINE = {"bits": 8, "norm": "linf", "bucket_size": 128}
STEPS = 20
# A table, a rotation, a code, lengths that vary, levels of each bucket, a bias.
LABELS = ("alq-3", "eden-2", "ecdq-3", "sparse-0.2", "bingrad", "signsgd")


class Net(nn.Module):
    """Three blocks whose sizes no number of ranks divides, one of them used twice."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 81), nn.Linear(81, 81)
        self.last, self.spare = nn.Linear(81, 11), nn.Linear(81, 11)
        self.scale = nn.Parameter(torch.ones(11))
        self.unused = unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.second(self.first(x).relu()).relu())
        return self.scale * (self.last(x) if self.unused else self.last(x) + self.spare(x))


def sharded(net: nn.Module, **options) -> nn.Module:
    """A copy: each layer by itself, and the rest."""
    model = copy.deepcopy(net)
    for layer in (model.first, model.second, model.last, model.spare):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def make(unused: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(unused)


def backward(model: nn.Module, step: int) -> torch.Tensor:
    """Add the gradients of a batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    x = torch.randn(16, 40, generator=generator)
    loss = nn.functional.cross_entropy(model(x).float(), x[:, :11].argmax(1))
    loss.backward()
    return loss.detach()


def stepped(model: nn.Module, compressed, step: int) -> None:
    """A step without an optimizer."""
    model.zero_grad()
    backward(model, step)
    compressed.finish()


def exact(net: nn.Module, *steps: int) -> dict[str, torch.Tensor]:
    """Averages of all ranks' gradients, in float64, without FSDP."""
    plain = copy.deepcopy(net)
    for step in steps:
        backward(plain, step)
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    return {name: torch.stack(gathered(g)).double().mean(0) for name, g in grads.items()}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients, of all shards."""
    named = model.named_parameters()
    return {n: p.grad.full_tensor().double() for n, p in named if p.grad is not None}


def assert_close(got, wanted, tolerance=0.02):
    assert got.keys() == wanted.keys()
    for name, mean in wanted.items():
        assert (got[name] - mean).norm() <= tolerance * mean.norm(), name


@pytest.mark.parametrize("label", LABELS)
def test_gradients_are_around_exact_ones(label):
    """See list_averages.check_exact."""
    net, calls = make(), 25
    model = sharded(net)
    compressed = compress_reduce_scatter(model, scheme(label, bucket_size=256)())
    wanted = exact(net, 0)
    names = ("first.weight", "second.weight")  # the others have fewer than 1,024 coordinates
    errors = []
    for call in range(calls + 1):
        stepped(model, compressed, 0)
        if call:  # tables are fitted at the end of the first step
            own = whole(model)
            errors.append(torch.cat([(own[n] - wanted[n]).view(-1) for n in names]))
            assert_close(
                {n: own[n] for n in ("last.weight", "scale")},
                {n: wanted[n] for n in ("last.weight", "scale")},
                1e-5,
            )
    norm = sum(wanted[n].square().sum() for n in names)
    squared = torch.stack(errors).square().sum(1).mean()
    assert 0 < squared < (5 * norm if label in UNBIASED else 1.5 * norm)
    if label in UNBIASED:
        ratio = torch.stack(errors).mean(0).square().sum() / squared * calls
        assert 0.5 < ratio < 1.6, (label, float(ratio))


VARIANTS = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "reduce_bf16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "reduce_fp16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    "reduce_fp64": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant):
    """bf16 itself loses more than 8 bits, so it is compared with FSDP's own reduce-scatter."""
    net = make()
    model, stock = (sharded(net, **VARIANTS[variant]) for _ in range(2))
    compress_reduce_scatter(model, QSGD(**FINE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        optimizer.zero_grad()
        stock.zero_grad()
        backward(model, step)
        backward(stock, step)
        assert_close(whole(model), whole(stock) if variant == "bf16" else exact(net, step), 0.03)
        optimizer.step()


@pytest.mark.parametrize("ending", ["late", "each"])
def test_accumulation(ending):
    """Reduced once, or after each backward pass; both are one step."""
    net = make()
    model = sharded(net)
    compressed = compress_reduce_scatter(model, QSGD(**FINE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in (0, 2):
        optimizer.zero_grad()
        if ending == "late":
            model.set_requires_gradient_sync(False)
        backward(model, step)
        model.set_requires_gradient_sync(True)
        backward(model, step + 1)
        optimizer.step()
        assert_close(whole(model), exact(net, step, step + 1))
    assert compressed.compressor.step == 2


def test_equal_gradients_are_rounded_anew():
    """Both backward passes of a step: their random numbers differ."""
    model = sharded(make())
    compress_reduce_scatter(model, QSGD(bits=2))
    backward(model, 0)
    once = whole(model)["first.weight"]
    backward(model, 0)
    twice = whole(model)["first.weight"]
    assert not torch.equal(twice, 2 * once)


def test_unused_modules():
    net = make(unused=True)
    model = sharded(net)
    compressed = compress_reduce_scatter(model, ALQ(bits=8, bucket_size=128))
    for step in range(3):
        stepped(model, compressed, step)
    assert "spare.weight" not in whole(model)
    assert_close(whole(model), exact(net, 2), 0.03)


@pytest.mark.parametrize("op", ["divide", "premul", "sum"])
def test_operations(op):
    """SUM with division after it, PREMUL_SUM, and SUM alone: FSDP divides by other factors."""
    net = make()
    model = sharded(net)
    compress_reduce_scatter(model, QSGD(**FINE))
    factor = 1.0
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            if op == "divide":
                module.set_force_sum_reduction_for_comms(True)
            else:
                divisor = 5.0 if op == "premul" else 1.0
                factor = RANKS / divisor
                module.set_gradient_divide_factor(divisor)
    backward(model, 0)
    assert_close(whole(model), {name: g * factor for name, g in exact(net, 0).items()})


def test_bits_are_the_codecs():
    """Each chunk is what the public codec makes of a rank's shard, decoded in rank order."""
    torch.manual_seed(0)
    net = nn.Linear(40, 100, bias=False)
    model = fully_shard(copy.deepcopy(net))
    codec, keywords = QSGD(bits=4, bucket_size=300), {"bits": 4, "bucket_size": 300}
    compressed = compress_reduce_scatter(model, QSGD(**keywords))

    def pass_back(module, rank, step):
        x = torch.randn(7, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        module(x).square().mean().backward()

    for step in range(3):
        model.zero_grad()
        pass_back(model, RANK, step)
        total = torch.zeros(4000 // RANKS)
        for rank in range(RANKS):
            net.zero_grad()
            pass_back(net, rank, step)
            chunk = net.weight.grad.view(RANKS, -1)[RANK].contiguous()
            key = stream_key(stream_key(0, rank, step, 0), RANK, 0)
            total += codec.decode(
                codec.parts.default.payloads.encode(chunk, chunk.numel(), key).bytes
            )
        got = model.weight.grad.to_local().reshape(-1)
        assert torch.equal(got, total * (1 / RANKS))
        compressed.finish()


def test_warm_up_is_exact():
    """Full precision, added in rank order."""
    net = make()
    model = sharded(net)
    compressed = compress_reduce_scatter(model, ALQ(bits=2, warmup_steps=2))
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        plain = copy.deepcopy(net)
        backward(plain, step)
        equal = True
        for name, parameter in plain.named_parameters():
            total = torch.zeros_like(parameter)
            for gradient in gathered(parameter.grad):
                total += gradient
            equal &= torch.equal(whole(model)[name], (total * (1 / RANKS)).double())
        assert equal == (step < 2)
        compressed.finish()


def test_tables_are_fitted_at_the_end_of_update_steps():
    model = sharded(make())
    compressor = ALQ(bits=3, bucket_size=256, update_steps=[0, 2])
    compressed = compress_reduce_scatter(model, compressor)
    versions, errors = [], []
    for _ in range(4):
        stepped(model, compressed, 0)
        versions.append(compressor.report()["table_version"])
        errors.append(compressor.report()["relative_error"])
    assert versions == [1, 1, 2, 2] and errors[1] < errors[0]
    assert_same_everywhere([compressor.levels])


def test_bits_by_module():
    net = make()
    model = sharded(net)
    compressor = QSGD(bits=2, bucket_size=128, parameter_bits={"first": None, "second": 8})
    compressed = compress_reduce_scatter(model, compressor)
    stepped(model, compressed, 0)
    got, wanted = whole(model), exact(net, 0)
    assert_close({"w": got["first.weight"]}, {"w": wanted["first.weight"]}, 1e-5)
    error = (got["second.weight"] - wanted["second.weight"]).norm()
    assert 1e-4 < error / wanted["second.weight"].norm() < 0.1
    groups = compressor._training.connection.layout.groups
    assert [group.part for group in groups][1:3] == ["", "bits=8"]


def test_partial_buckets_in_full_precision():
    net = make()
    model = sharded(net)
    compressed = compress_reduce_scatter(model, QSGD(**FINE | {"tail": "full"}))
    stepped(model, compressed, 0)
    assert_close(whole(model), exact(net, 0))
    groups = compressed.compressor._training.connection.layout.groups
    assert any(0 < group.full < group.quantized for group in groups)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_training_is_float32s(name):
    """STEPS steps of 4 bits end near those of FSDP's own reduce-scatter, on all ranks alike."""
    make_optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, 0.4),
        "adam": lambda p: torch.optim.Adam(p, 0.01),
    }[name]
    losses = []
    for compresses in (False, True):
        model = sharded(make())
        if compresses:
            compress_reduce_scatter(model, EDEN(bits=4, bucket_size=1024))
        optimizer = make_optimizer(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = backward(model, step)
            optimizer.step()
        losses.append(float(torch.stack(gathered(loss)).mean()))
    assert losses[1] == pytest.approx(losses[0], rel=0.1) and losses[0] < 2.3
    assert_same_everywhere([p.full_tensor() for p in model.parameters()])


@pytest.mark.parametrize("way", ["own", "dcp"])
def test_a_run_resumes(way, tmp_path_factory):
    """Bit for bit, from each rank's own file and from a distributed checkpoint."""

    def made():
        model = sharded(make())
        compressor = ALQ(bits=3, bucket_size=256, update_steps=[0, 3])
        compressed = compress_reduce_scatter(model, compressor)
        return model, compressed, torch.optim.SGD(model.parameters(), 0.1)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()

    def local(model):
        return [p.to_local().clone() for p in model.parameters()]

    instances.start_over()
    model, compressed, optimizer = made()
    train(model, optimizer, range(2))
    if way == "own":
        file = io.BytesIO()
        torch.save(compressed.compressor.state_dict(), file)
    else:
        folder = [str(tmp_path_factory.mktemp("dcp")) if RANK == 0 else None]
        dist.broadcast_object_list(folder)
        state = {"model": model.state_dict(), "compression": compressed.state_dict()}
        dcp.save(state, checkpoint_id=folder[0])
    saved = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2, 6))
    expected = local(model)

    instances.start_over()
    model, compressed, optimizer = made()
    if way == "own":
        model.load_state_dict(saved)
        file.seek(0)
        compressed.compressor.load_state_dict(torch.load(file, weights_only=True))
    else:
        state = {"model": model.state_dict(), "compression": compressed.state_dict()}
        dcp.load(state, checkpoint_id=folder[0])
        model.load_state_dict(state["model"])
        compressed.load_state_dict(state["compression"])
    assert compressed.compressor.step == 2
    train(model, optimizer, range(2, 6))
    assert all(torch.equal(a, b) for a, b in zip(local(model), expected, strict=True))


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
    tells = mesh["nodes" if door == "replicas" else "shards"].get_local_rank() == 0
    tells = tells and words == 40
    assert len(told[1]) == int(tells)
    if tells:
        # Of 2 shards of a table of which a tenth is used, the second is zero.
        share = 80 + 20 * RANK if door == "replicas" and inside > 1 else 90
        assert "exactly zero, and this scheme rounds zeros" in told[1][0]
        assert f": 'table' ({share}%);" in told[1][0] and "{'table': None}" in told[1][0]


@pytest.mark.parametrize("how", [truncated, flipped])
@pytest.mark.parametrize("lengths", ["equal", "that vary"])
def test_a_corrupt_payload_stops_all_ranks(how, lengths, monkeypatch):
    """Before the optimizer's step; the next step works."""
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
    backward(model, 0)
    with pytest.raises(PayloadError, match=rf"corrupt at rank {RANKS - 1} \("):
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), dict(net.named_parameters())[name]), name
    assert compressor.step == 0
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()
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


def test_settings_change():
    model = sharded(make())
    compressor = QSGD(bits=4, bucket_size=128)
    compressed = compress_reduce_scatter(model, compressor)
    sent = []
    for bits in (4, 8, 2):
        compressor.set(bits=bits)
        stepped(model, compressed, 0)
        sent.append(compressor.report()["wire_bytes"])
    assert sent[2] < sent[0] < sent[1] and compressor.step == 3


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
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        if step == 0:
            assert_close(whole(model), exact(net, 0), 0.02 if name is None else 0.05)
    assert compressed.compressor.step == 5
    assert_same_everywhere([p.full_tensor() for p in model.parameters()])


@pytest.mark.parametrize("seen", ["report", "end", "trained"])
def test_a_model_that_nobody_trains(seen, caplog):
    """A warning, once, if the copy is trained that has no compressor."""
    model, compressor = sharded(make()), QSGD(**FINE)
    compressed = compress_reduce_scatter(
        model if seen == "trained" else sharded(make()), compressor
    )
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        stepped(model, compressed, 0)
        if seen != "end":
            compressor.report()
            compressor.report()
        del compressed, model
        gc.collect()
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert sum(UNUSED in message for message in told) == int(seen != "trained" and RANK == 0)
