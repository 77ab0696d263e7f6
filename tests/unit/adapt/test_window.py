"""Fits are based on several steps: gradients of kinds that take turns, scales, states."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from exact_errors import relative_error

from hvd_adaptive import ALQ, AMQ, ECDQ, QSGD
from hvd_adaptive.adapt import updates
from hvd_adaptive.adapt.updates import SampleWindow
from hvd_adaptive.simulate import Ranks

BUCKET, COUNT, RANKS = 1024, 1 << 15, 2
AROUND_FITS = (*range(8), *range(92, 104))  # at 0, 1, 7 and 100, of which no step between is part
CHOICES = [("l2", True), ("linf", True), ("linf", False)]


def gradient(kind: int, *seed: int) -> torch.Tensor:
    """Normal coordinates, or log-normal ones of random signs (σ = 2); float32 (COUNT,)."""
    rng = np.random.default_rng([kind, *seed])
    v = rng.standard_normal(COUNT)
    v = np.exp(2 * v) * rng.choice([-1.0, 1.0], COUNT) if kind else v
    return torch.from_numpy(v.astype(np.float32))


class Run:
    """Two ranks that fit a compressor's tables; nothing is exchanged."""

    def __init__(self, compressor) -> None:
        self.compressor = compressor
        self.parameters = [torch.nn.Parameter(torch.zeros(COUNT)) for _ in range(2)]
        self.ranks = Ranks(list(zip("ab", self.parameters, strict=True)), compressor, RANKS)

    def step(self, kind: int, halves: bool = False, scale: float = 1.0) -> None:
        """halves: gradients of a kind belong to one of the two parameters, as in a GAN."""
        step = self.compressor.step
        for rank in range(RANKS):
            for index, parameter in enumerate(self.parameters):
                own = not halves or index == kind
                parameter.grad = scale * own * gradient(kind, step, rank, index)
            self.ranks.take(rank)
        if self.ranks.due(step):
            self.ranks.refit(step)
        self.compressor.step += 1


def make(norm: str = "l2", symmetric: bool = True, **keywords) -> ALQ:
    keywords = {"bits": 3} | keywords
    return ALQ(norm=norm, symmetric=symmetric, bucket_size=BUCKET, min_numel=0, **keywords)


def errors(compressor, norm: str, parts: tuple[str, str] = ("", "")) -> list[float]:
    """Relative errors of fresh gradients of both kinds."""
    levels = [compressor.parts[part].levels.numpy() for part in parts]
    return [relative_error(gradient(k, 9999).numpy(), levels[k], BUCKET, norm) for k in (0, 1)]


@functools.cache
def possible(norm: str, symmetric: bool) -> list[float]:
    """Relative errors of tables that are fitted to one kind each."""
    best = []
    for kind in (0, 1):
        compressor = make(norm, symmetric)
        compressor.fit([gradient(kind, 100, i) for i in range(4)])
        best.append(errors(compressor, norm)[kind])
    return best


@pytest.mark.parametrize("halves", (False, True), ids=("one network", "two networks"))
@pytest.mark.parametrize(("norm", "symmetric"), CHOICES)
def test_one_table_serves_gradients_of_two_kinds_in_turn(norm, symmetric, halves):
    """From step 1 on, also where planned fits fall on even steps alone."""
    run, best = Run(make(norm, symmetric)), possible(norm, symmetric)
    for step in AROUND_FITS:
        run.compressor.step = step
        run.step(step % 2, halves)
        if step in (1, 7, 103):
            found = errors(run.compressor, norm)
            assert found[0] <= 2.6 * best[0] and found[1] <= 1.6 * best[1], (step, found, best)


@pytest.mark.parametrize("period", (3, 6, 8))
def test_a_kind_of_every_few_steps_is_among_those_sampled(period):
    """As a GAN's generator that is trained after several steps of the critic."""
    run, best = Run(make("linf", True)), possible("linf", True)
    for step in AROUND_FITS:
        run.compressor.step = step
        run.step(int(step % period == period - 1))
        if step in (7, 103):
            assert errors(run.compressor, "linf")[1] <= 1.8 * best[1], step


@pytest.mark.parametrize(("norm", "symmetric"), CHOICES)
def test_a_table_for_each_tensor_suits_each_network(norm, symmetric):
    run, best = Run(make(norm, symmetric, scope="tensor")), possible(norm, symmetric)
    for step in range(10):
        run.step(step % 2, halves=True)
    found = errors(run.compressor, norm, ("a", "b"))
    assert all(f <= 1.05 * b for f, b in zip(found, best, strict=True))


def numbers(compressor) -> np.ndarray:
    """What was fitted, of all parts."""
    if isinstance(compressor, ECDQ):
        return compressor.parts.default.code.numbers()
    found = []
    for codec in compressor.parts.values():
        books = codec.table.probabilities
        found += [codec.table.magnitudes, np.zeros(0) if books is None else books]
    return np.concatenate(found)


MAKERS = {
    "alq": make,
    "alq-linf-zero": lambda **k: make("linf", False, **k),
    "alq-n": lambda **k: make(normalized=True, **k),
    "alq-normal": lambda **k: make(statistics="normal", **k),
    "alq-tensor": lambda **k: make(scope="tensor", **k),
    "amq": lambda **k: AMQ(bits=3, bucket_size=BUCKET, min_numel=0, **k),
    "qsgd-huffman": lambda **k: QSGD(bits=4, coding="huffman", bucket_size=BUCKET, **k),
    "ecdq": lambda **k: ECDQ(bits=2, bucket_size=BUCKET, min_numel=0, **k),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_scale_of_a_step_changes_no_table(name):
    """AMP's loss scale, a power of two, may change between the steps of a window."""
    plain, scaled = Run(MAKERS[name]()), Run(MAKERS[name]())
    for step in range(8):
        plain.step(step % 2)
        scaled.step(step % 2, scale=2.0 ** (10 - 3 * step))
    assert np.array_equal(numbers(plain.compressor), numbers(scaled.compressor))


def test_a_state_holds_samples_only_before_a_fit():
    run = Run(make(update_steps=[0, 20]))
    held = []
    for step in range(24):
        run.step(0)
        if "window" in run.compressor.state_dict():
            held.append(step)
    assert held == list(range(13, 20))


def test_another_attempt_at_a_step_replaces_its_samples(monkeypatch):
    kept = SampleWindow()
    for step, value in ((3, 1.0), (4, 2.0), (4, 3.0), (5, 4.0), (4, 5.0)):
        kept.add(0, step, {"": np.array([value])})
    assert [float(v[0]) for v in kept.before(0, 5, "").values()] == [1.0, 5.0]
    assert kept.before(1, 5, "") == kept.before(0, 5, "other") == {}
    assert [float(v[0]) for v in kept.before(0, 11, "").values()] == [5.0], "the last eight steps"
    # Those of many parts are bounded; at least one earlier step is kept.
    monkeypatch.setattr(updates, "MOST_BYTES", 100 * 8)
    for parts, most in ((10, 7), (40, 2), (1000, 1)):
        kept = SampleWindow()
        for step in range(12):
            kept.add(0, step, {str(part): np.zeros(1) for part in range(parts)})
        assert len(kept.before(0, 11, "0")) == most


def test_a_state_with_other_samples_is_refused():
    run = Run(make(update_steps=[5]))
    run.step(0)
    run.step(0)
    state = run.compressor.state_dict()
    (saved,) = state["window"]["0"].values()
    steps = (torch.tensor([2, 1]), torch.tensor([0.5, 1]), torch.tensor([-1, 1]), torch.arange(9))
    changes = [{"steps": wrong} for wrong in steps]
    changes += [{"statistics": torch.zeros(3)}, {"statistics": "many"}]
    for window_ in ({"x": {"": saved}}, *({"0": {"": saved | change}} for change in changes)):
        with pytest.raises(ValueError, match="state: window"):
            make(update_steps=[5]).load_state_dict(state | {"window": window_})
    saved["statistics"][7] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        make(update_steps=[5]).load_state_dict(state)
