"""Every rank's average of every gradient, beside the exact one, by each door (see tests/nets.py).

Each rank draws all ranks' gradients from seeds and averages them in float64, without this package.
Memory that is used again while a collective still reads it shows as a wrong average, where ranks
are slow enough: tests/unit/hooks/horovod/test_any_order.py reads it as late as may be.
"""

from __future__ import annotations

import functools

import pytest
import torch
from nets import Given, hash_of, is_same
from settings_objects import exchange_of

from hvd_adaptive import QSGD

__all__ = ["check", "test_compressed", "test_other_dtypes", "test_warm_up"]
STEPS = 3
# Relative error of an average that 8 bits of the largest of a bucket's coordinates allow, and that
# of a second stage of 8 bits: a fifth of it. Swapped gradients have 1 or more.
COMPRESSED, EXACT = 0.03, 1e-6

MODELS = {
    # By default, groups hold several whole matrices and nothing else.
    "large": [(512, 512)] * 24,
    # A quarter of it in groups of a quarter.
    "matrices": [(256, 256)] * 24,
    # Both sections in each group.
    "biases": [(150, 150), (150,)] * 40,
    # Nothing is quantised unless min_numel says so.
    "small": [(30, 30), (30,)] * 400,
    "one": [(2000, 1500)],
}
FUSION = {"matrices": 1 << 22, "biases": 1 << 19, "small": 1 << 19}
EXCHANGES = ["allgather", "scatter_reduce", "hierarchical", "auto"]


@functools.lru_cache(maxsize=4 * STEPS)
def drawn(model_name, rank, step, dtype):
    """A rank's gradients of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(s, generator=generator).to(dtype) for s in MODELS[model_name]]


@functools.lru_cache(maxsize=STEPS)
def exact(model_name, ranks, step, dtype):
    """The average over all ranks, float64."""
    everyone = [drawn(model_name, rank, step, dtype) for rank in range(ranks)]
    return [sum(g.double() for g in of_one) / ranks for of_one in zip(*everyone, strict=True)]


@pytest.fixture
def check(door, rank, ranks, gather):
    """Trains a model, and compares all averages."""

    def check(
        name, exchange, per_node=None, bound=COMPRESSED, steps=STEPS, dtype=torch.float32, **own
    ):
        several = {"fusion_bytes": FUSION[name]} if name in FUSION else {}
        keywords = {"bits": 8, "norm": "linf"} | several | own
        keywords["exchange"] = exchange_of(exchange, second_stage_bits=8, ranks_per_node=per_node)
        net = Given(MODELS[name], dtype)
        training = door(net, QSGD(**keywords))
        for step in range(steps):
            training.optimizer.zero_grad()
            training.average(training.model(drawn(name, rank, step, dtype)))
            pairs = zip(net.weights, exact(name, ranks, step, dtype), strict=True)
            errors = [float((w.grad.double() - want).norm() / want.norm()) for w, want in pairs]
            wrong = {slot: error for slot, error in enumerate(errors) if not error < bound}
            assert not wrong, f"step {step}: {len(wrong)} of {len(errors)} are wrong: {wrong}"
            assert is_same(gather, "".join(hash_of(w.grad) for w in net.weights))
            training.step()

    return check


def sizes_of_nodes(ranks, exchange):
    """Every number of ranks that a node may hold, the number that this node does last."""
    if exchange != "hierarchical":
        return [None]
    return [n for n in (1, 2, 4) if ranks % n == 0 and n <= ranks]


@pytest.mark.gloo
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("model", MODELS)
def test_compressed(check, ranks, exchange, model):
    """With nodes as they are found (one), and smaller ones."""
    for per_node in [None, *sizes_of_nodes(ranks, exchange)[:-1]]:
        check(model, exchange, per_node)


@pytest.mark.gloo
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("model", ["matrices", "biases"])
def test_warm_up(check, ranks, model, exchange):
    """Steps in full precision; then one that is compressed."""
    for per_node in sizes_of_nodes(ranks, exchange):
        bound = COMPRESSED if exchange == "auto" else EXACT  # which may round to bfloat16
        check(model, exchange, per_node, bound, steps=2, warmup_steps=2)
        check(model, exchange, per_node, warmup_steps=2)


@pytest.mark.gloo
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes(check, dtype, exchange):
    check("biases", dtype=dtype, exchange=exchange)
