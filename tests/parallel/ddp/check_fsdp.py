"""FSDP2 over gloo: gradients against exact ones of a plain model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ddp_oracles import assert_same_everywhere, gathered
from fsdp_nets import FINE, RANK, assert_close, backward, exact, make, sharded, stepped, whole
from scheme_cases import scheme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hvd_adaptive import ALQ, QSGD
from hvd_adaptive.fsdp import compress_reduce_scatter
from hvd_adaptive.kernels.random import stream_key

RANKS = dist.get_world_size()
# A table, a rotation, a code, lengths that vary; levels of each bucket, a bias.
UNBIASED = ("alq-3", "eden-2", "ecdq-3", "sparse-0.2")
LABELS = (*UNBIASED, "bingrad", "signsgd")


@pytest.mark.parametrize("label", LABELS)
def test_gradients_are_around_exact_ones(label):
    """Their mean is the exact one, if the scheme is unbiased.

    Without bias the squared error of a mean of N is an N-th of a single one's; the ratio of both
    has a standard deviation of about sqrt(2 / 6000), or a few times that if few coordinates have
    most of the error.
    """
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
            small = ({n: of[n] for n in ("last.weight", "scale")} for of in (own, wanted))
            assert_close(*small, 1e-5)
    norm = sum(wanted[n].square().sum() for n in names)
    squared = torch.stack(errors).square().sum(1).mean()
    assert 0 < squared < (5 * norm if label in UNBIASED else 1.5 * norm)
    if label in UNBIASED:
        ratio = torch.stack(errors).mean(0).square().sum() / squared * calls
        assert 0.5 < ratio < 1.6, (label, float(ratio))


LOW = torch.bfloat16
# Options of fully_shard, and of the compressor; or of the model.
VARIANTS = {
    "plain": ({}, {}),
    "kept": ({"reshard_after_forward": False}, {}),
    "reduce_bf16": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=LOW)}, {}),
    "reduce_fp16": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, {}),
    "reduce_fp64": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}, {}),
    "bf16": ({"mp_policy": MixedPrecisionPolicy(LOW, torch.float32)}, {}),
    "unused modules": ({}, {}),
    "partial buckets": ({}, {"tail": "full"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant):
    """bf16 itself loses more than 8 bits, so it is compared with FSDP's own reduce-scatter."""
    options, keywords = VARIANTS[variant]
    net = make(unused=variant == "unused modules")
    model, stock = (sharded(net, **options) for _ in range(2))
    compressed = compress_reduce_scatter(model, QSGD(**FINE | keywords))
    for step in range(3):
        stepped(model, compressed, step)
        stock.zero_grad()
        backward(stock, step)
        assert_close(whole(model), whole(stock) if variant == "bf16" else exact(net, step), 0.03)
    groups = compressed.compressor._training.connection.layout.groups
    assert variant != "partial buckets" or any(0 < g.full < g.quantized for g in groups)


@pytest.mark.parametrize("ending", ["late", "each"])
def test_accumulation(ending):
    """Reduced once, or after each backward pass; both are one step."""
    net = make()
    model = sharded(net)
    compressed = compress_reduce_scatter(model, QSGD(**FINE))
    for step in (0, 2):
        model.zero_grad()
        model.set_requires_gradient_sync(ending == "each")
        backward(model, step)
        model.set_requires_gradient_sync(True)
        backward(model, step + 1)
        compressed.finish()
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
        got = whole(model)
        means = {n: sum(gathered(p.grad)) * (1 / RANKS) for n, p in plain.named_parameters()}
        equal = [torch.equal(got[name], mean.double()) for name, mean in means.items()]
        assert all(equal) == (step < 2)
        compressed.finish()


@pytest.mark.parametrize("statistics", ["histogram", "normal"])
def test_tables_are_fitted_at_the_end_of_update_steps(statistics):
    """To a bucket or more of each module and backward pass, which may be more than samples."""
    model = sharded(make())
    compressor = ALQ(bits=3, bucket_size=256, update_steps=[0, 2], statistics=statistics)
    compressed = compress_reduce_scatter(model, compressor)
    versions, errors = [], []
    for _ in range(4):
        backward(model, 1)
        stepped(model, compressed, 0)
        versions.append(compressor.report()["table_version"])
        errors.append(compressor.report()["relative_error"])
    assert versions == [1, 1, 2, 2] and errors[1] < errors[0]
    assert_same_everywhere(compressor.levels)


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


def test_modules_of_different_groups():
    """Refused on all ranks in the first backward pass; a compressor for each group is right."""
    if RANKS != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "shards"))

    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        fully_shard(model[0], mesh=mesh["shards"])
        fully_shard(model[1])
        return model

    model = made()
    compress_reduce_scatter(model, QSGD(**FINE))
    with pytest.raises(ValueError, match="sharded over different groups of ranks"):
        model(torch.ones(2, 40)).sum().backward()
    model = made()
    both = [compress_reduce_scatter(layer, QSGD(**FINE)) for layer in model]
    model(torch.ones(2, 40)).sum().backward()
    both[0].finish()
    both[1].finish()
    assert both[0].compressor.step == both[1].compressor.step == 1


def test_a_second_compressor_is_refused():
    """Of the model or a layer, until the first one is closed."""
    model, first, second = sharded(make()), QSGD(**FINE), QSGD(**FINE)
    compress_reduce_scatter(model, first)
    for again in (model, model.first):
        with pytest.raises(ValueError, match=r"^model: another compressor already serves it"):
            compress_reduce_scatter(again, second)
    first.close()
    stepped(model, compress_reduce_scatter(model, second), 0)
    assert second.step == 1
