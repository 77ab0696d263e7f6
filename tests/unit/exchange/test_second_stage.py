"""How many bits averages get, and what they add to the variance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scheme_cases import scheme
from simulated_steps import take_step
from test_exchanges import averaged

from hvd_adaptive import ALQ, EDEN, QSGD, Hierarchical, ScatterReduce, SparseSGD, simulate
from hvd_adaptive.codec import second_stage
from hvd_adaptive.codec.second_stage import FULL_PRECISION, default_bits, references
from hvd_adaptive.levels import (
    averaged_law,
    expected_variance,
    symbol_probabilities,
    uniform_magnitudes,
)
from hvd_adaptive.levels.distributions import Histogram
from hvd_adaptive.schemes.eden import EDENCodec

pytestmark = pytest.mark.many
COORDINATES = 1 << 15
LEVELS = {"l2": np.array([0.004, 0.02, 0.1, 1.0]), "linf": np.array([0.05, 0.2, 0.5, 1.0])}
SCHEMES = {
    "alq": scheme("alq-3", samples=8),
    "alq-paper": scheme("alq-3-paper", samples=8),
    "amq-paper": scheme("amq-3-paper", bucket_size=2048, samples=30),
    "qsgd-linf": scheme("qsgd-4-linf", bucket_size=512),
    "terngrad": scheme("terngrad-unclipped"),
    "orq": scheme("orq-5", bucket_size=2048),
    "sparse": scheme("sparse-0.05", bucket_size=1024),
    "qcs": scheme("qcs-gain10", bucket_size=1024),
    "nuqsgd-huffman": scheme("nuqsgd-4-huffman", bucket_size=4096),
    "ecdq": scheme("ecdq-2.5", bucket_size=4096),
}
WORTH = ("alq", "alq-paper", "qsgd-linf", "orq")


def normal(seed: int) -> torch.Tensor:
    return torch.randn(COORDINATES, generator=torch.Generator().manual_seed(seed))


def laplacian(seed: int) -> torch.Tensor:
    """Difference of two exponential variables."""
    generator = torch.Generator().manual_seed(seed)
    one, two = torch.empty(2, COORDINATES).exponential_(generator=generator)
    return one - two


def squared_error(compressor, workers: int, aligned: bool, steps: int = 2, draw=normal) -> float:
    """Of the average, summed over steps with gradients that are alike or independent."""
    weight, total = torch.nn.Parameter(torch.zeros(COORDINATES)), 0.0
    ranks = simulate.Ranks([("w", weight)], compressor, workers)
    for step in range(steps):
        own = [draw(step if aligned else 100 * step + rank) for rank in range(workers)]
        (average,) = take_step(ranks, step, [weight], [[v] for v in own])
        total += float((average - torch.stack(own).double().mean(dim=0)).square().sum())
    return total


def shares(name: str, workers: int, bits: list[int]) -> list[float]:
    """What averages of these bits add to the error of an allgather, as a share of it: the larger of
    both laws, and of gradients that are alike or independent."""
    found = []
    for draw, aligned in itertools.product((normal, laplacian), (True, False)):
        plain = squared_error(SCHEMES[name](), workers, aligned, draw=draw)
        found.append([])
        for own in bits:
            two = SCHEMES[name](exchange=ScatterReduce(second_stage_bits=own))
            found[-1].append(squared_error(two, workers, aligned, draw=draw) / plain - 1)
    return [max(of_bits) for of_bits in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("name", "workers"), list(zip(SCHEMES, itertools.cycle((2, 5)), strict=False))
)
def test_what_the_bits_add(name, workers):
    """A further bit is worth less than 3/4 of the first stage's variance, which such a bit divides
    by 4. Then the second stage adds about as much as the first one at most. The last bit is worth
    more, but for schemes whose averages need few. The rest is for what is random."""
    bits = default_bits(SCHEMES[name]().parts.default, workers)
    fewer, own, *further = shares(name, workers, list(range(bits - 1, min(bits + 1, 8) + 1)))
    assert own < 1.1
    assert own - sum(further) < 0.85
    assert fewer - own > 0.6 or name not in WORTH


def test_bits_by_hand_for_uniform_levels():
    """QSGDinf: the step's square says it, γ2/γ1 = (s1/s2)², but for levels that gradients meet, and
    averages of few ranks."""
    codec, steps = QSGD(bits=4, norm="linf").parts.default, 2.0 ** np.arange(1, 8) - 1
    for ranks in (4, 8, 32):
        added = []
        for v in references(8192):
            v = v.double().view(-1, 8192)
            top = v.abs().amax(dim=1, keepdim=True)
            least = torch.frac(7 * v.abs() / top)
            gamma1 = float((least * (1 - least) * (top / 7) ** 2).sum() / v.square().sum())
            added.append(ranks * (7 / steps) ** 2 * (1 + gamma1 / ranks))
        saved = -np.diff(np.max(added, axis=0))
        assert default_bits(codec, ranks) == 2 + int(np.argmax(saved <= 0.75))


@pytest.mark.parametrize(("index", "kurtosis"), [(0, 3), (1, 6)], ids=["normal", "laplacian"])
@pytest.mark.parametrize("size", [1, 100, 8192, 2**20])
def test_the_references(size, index, kurtosis):
    v = references(size)[index].double()
    assert v.numel() == (2**16 if size == 2**20 else 2**14)
    assert abs(float(v.mean())) < 1e-6
    assert float(v.square().mean()) == pytest.approx(1, abs=5e-3)
    assert float((v**4).mean()) == pytest.approx(kurtosis, rel=0.05)
    assert abs(float((v[:-1] * v[1:]).mean())) < 0.05, "neighbours are not alike"


def laws(norm: str, own: str, workers: int) -> tuple[Histogram, Histogram]:
    """The true law of averages of heavy-tailed buckets that were decoded, and averaged_law's."""
    generator = np.random.default_rng(1)
    levels = LEVELS[norm]
    signed = np.concatenate([-levels[::-1], levels])

    def scaled(v, norm):
        return v / np.linalg.norm(v, 2 if norm == "l2" else np.inf, axis=1, keepdims=True)

    def unit():
        return scaled(generator.standard_t(5, size=(64, 4096)), norm)

    def decoded(v):
        up = np.clip(np.searchsorted(signed, v), 1, signed.size - 1)
        low, high = signed[up - 1], signed[up]
        return np.where(generator.random(v.shape) * (high - low) < v - low, high, low)

    same = unit()
    alike = sum(decoded(same) for _ in range(workers)) / workers
    independent = sum(decoded(unit()) for _ in range(workers)) / workers
    truth = np.abs(np.concatenate([scaled(a, own) for a in (alike, independent)])).clip(max=1)
    given = Histogram.from_samples(np.abs(same))
    return Histogram.from_samples(truth), averaged_law(given, levels, True, workers, norm, own)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("workers", [2, 6])
def test_variance_of_a_table_under_the_law_of_averages(norm, workers):
    truth, law = laws(norm, norm, workers)
    for table in (LEVELS[norm], np.geomspace(1e-3, 1, 16), np.linspace(0.01, 1, 32)):
        want = expected_variance(table, truth, True)
        assert expected_variance(table, law, True) == pytest.approx(want, rel=0.1)


@pytest.mark.parametrize(("bits", "most"), [(3, 0.05), (5, 0.05), (7, 0.2)])
@pytest.mark.parametrize("workers", [2, 6])
def test_a_book_for_another_norm_is_little_longer(workers, bits, most):
    """Of uniform levels, which are not fitted: its code lengths against the entropy. Variances
    are a third too large there: buckets' largest coordinates differ, the law has but one."""
    levels = uniform_magnitudes(1 << (bits - 1), False)
    p, q = (symbol_probabilities(levels, law, False) for law in laws("l2", "linf", workers))
    q = np.maximum(q, 2.0**-20) / np.maximum(q, 2.0**-20).sum()
    entropy = -(p[p > 0] @ np.log2(p[p > 0]))
    assert entropy < -(p @ np.log2(q)) < (1 + most) * entropy


def test_a_first_table_that_is_never_refitted_stays():
    """The averages' table is fitted at once all the same, and once."""
    compressor = ALQ(bits=3, update_steps=[], exchange="scatter_reduce")
    before = compressor.levels
    weight = torch.nn.Parameter(torch.zeros(COORDINATES))
    ranks, due = simulate.Ranks([("w", weight)], compressor, 2), []
    for step in range(4):
        due.append(ranks.due(step))
        take_step(ranks, step, [weight], [[normal(rank) * (step > 0)] for rank in range(2)])
    assert due == [True, True, False, False], "zeros say nothing: once more"
    assert torch.equal(compressor.levels, before) and compressor.parts.default.table_version == 0
    assert compressor.parts.default.second_stage(2).codec.table_version == 1


def test_few_coordinates_stay_few():
    """Averages of sparse payloads take less than the packed codes of their bits."""
    codec = SparseSGD(density=0.01).parts.default.second_codec(3)
    v = normal(1) * (normal(2) > 1.9)
    payload = codec.payloads.encode(v, v.numel(), 1).bytes
    assert 8 * payload.numel() < 0.5 * v.numel()


def test_averages_of_two_codes_of_one_bit_have_two_bits():
    """Of two levels each: an average is one of three or four numbers, that of more ranks is not."""
    codec = scheme("bingrad", bucket_size=512)().parts.default
    assert [default_bits(codec, ranks) for ranks in (2, 3)] == [2, 3]


@pytest.mark.parametrize("bits", [0.5, 1, 2])
def test_default_bits_of_eden(bits, monkeypatch):
    """A formula gives those of measured errors."""
    codec = EDEN(bits=bits).parts.default
    found = [default_bits(codec, ranks) for ranks in (4, 16)]
    monkeypatch.setattr(EDENCodec, "expected_error", None)
    monkeypatch.setattr(second_stage, "_chosen", {})
    assert [default_bits(codec, ranks) for ranks in (4, 16)] == found


# Each coordinate is its own bucket, and so its own scale; or all of them are sent.
LOSSLESS = {
    "sparse": scheme("sparse-1.0"),
    "qsgd-linf": scheme("qsgd-3-linf", bucket_size=1),
    "nuqsgd": scheme("nuqsgd-3", bucket_size=1),
    "orq": scheme("orq-5", bucket_size=1),
    "bingrad": scheme("bingrad", bucket_size=1),
    "onebit": scheme("onebit-no-feedback", bucket_size=1),
}


@pytest.mark.parametrize("scheme", LOSSLESS)
def test_a_stage_that_loses_nothing_is_followed_by_one_that_does_not_either(scheme):
    """On 3 nodes of 2 ranks."""
    exchange = Hierarchical(ranks_per_node=2)
    assert default_bits(LOSSLESS[scheme]().parts.default, 3) == FULL_PRECISION
    exact, found = averaged(LOSSLESS[scheme](exchange=exchange), 6, sizes=(1100, 30))
    for want, got in zip(exact, found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_a_little_loss_is_not_none():
    """One coordinate in a hundred is lost by chance: 8 bits, and a warning, as before."""
    assert default_bits(SparseSGD(density=0.99).parts.default, 4) == 8
