"""The multiplier of water-filling over steps: the rate, the error, states, steps given up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hvd_adaptive import EDEN
from hvd_adaptive.levels.waterfill import allocate, multiplier_of, spend
from hvd_adaptive.schemes.threshold import Threshold

LOSSES = np.array([0.6, 0.15, 0.04, 0.01])
SIZE = 4096


def layers(step: int, buckets: int = 40) -> list[np.ndarray]:
    """Energies of eight payloads, whose scales differ by powers of ten; they fall, and vary by a
    third from step to step."""
    draw = np.random.default_rng(step)
    own = np.exp(draw.normal(0, 0.3) - step / 100)
    return [own * 10.0 ** -(k % 5) * np.exp(draw.normal(0, 1, buckets)) for k in range(8)]


def run(threshold: Threshold, steps: int) -> list[tuple[float, float]]:
    """Return bits per coordinate and relative error of each step."""
    found, lengths = [], np.full(40, SIZE)
    for step in range(steps):
        bits = error = energy = 0.0
        for energies in layers(step):
            widths, chances = threshold.allot_next(energies, lengths)
            own = np.array([0.0, *LOSSES])[widths]
            bits += float(widths @ chances)
            error += float((((1 + own) / chances - 1) * energies).sum())
            energy += float(energies.sum())
        threshold.end_step()
        found.append((bits / 320, error / energy))
    return found


@pytest.mark.parametrize("bits", (0.5, 1.0, 1.7, 3.0))
def test_the_rate_is_met_on_average_and_the_error_falls(bits):
    found = run(Threshold(bits, LOSSES), 200)
    rates, errors = np.array(found).T
    assert rates[0] == pytest.approx(bits, rel=0.02) and rates[0] <= bits  # each payload's own
    assert rates[10:].mean() == pytest.approx(bits, rel=0.02)
    assert (np.abs(rates[1:] - bits) < 0.15 * bits).mean() > 0.95
    # Of all payloads together, far less error than in the first step.
    assert np.median(errors[1:]) < 0.6 * errors[0]


@pytest.mark.parametrize("bits", (0.3, 1.0, 2.5, 4.0, 6.0))
def test_multipliers_spend_what_is_asked_for(bits):
    energies, lengths = np.concatenate(layers(0)), np.full(320, SIZE)
    energies[::7] = 0
    multiplier = multiplier_of(energies, lengths, LOSSES, bits)
    widths, chances = spend(energies, lengths, LOSSES, multiplier)
    asked = min(bits, 4 * np.count_nonzero(energies) / 320)
    assert -1e-9 <= asked - (widths * chances).mean() <= 0.02
    assert not widths[::7].any() and not chances[::7].any()
    # Equal buckets fall to fewer bits together; allocate divides what is left.
    own = allocate(energies, lengths, LOSSES, bits)[0]
    assert (np.abs(own - widths) <= 1).all() and (own == widths).mean() > 0.98


def test_steps_without_energy_and_steps_given_up_change_nothing():
    threshold = Threshold(1.0, LOSSES)
    run(threshold, 3)
    before = threshold.multiplier
    threshold.allot_next(np.ones(4), np.full(4, SIZE))
    assert threshold.multiplier != before
    threshold.forget_step()
    threshold.end_step()
    threshold.allot_next(np.zeros(4), np.full(4, SIZE))
    threshold.end_step()
    assert threshold.multiplier == before


def test_the_energy_of_a_minibatch_hardly_changes_the_rate():
    """Energies three times as large would take 0.8 bits more; the first payload shows it."""
    found = []
    for factor in (1.0, 3.0):
        threshold, lengths = Threshold(1.0, LOSSES), np.full(40, SIZE)
        for scale in (1.0, 1.0, factor):
            own = [threshold.allot_next(scale * e, lengths) for e in layers(0)]
            threshold.end_step()
        found.append([float(widths @ chances) / 40 for widths, chances in own])
    usual, scaled = np.array(found)
    assert scaled[0] - usual[0] < 0.35
    assert 0 <= scaled.mean() - usual.mean() < 0.12


def test_states_continue_the_run():
    one, other = EDEN(bits=1, allocation="waterfill"), EDEN(bits=1, allocation="waterfill")
    draw = torch.Generator().manual_seed(0)
    for step in range(4):
        flat = torch.randn(30_000, generator=draw) * 10.0 ** -(torch.arange(30_000) // 4096)
        if step == 2:
            other.load_state_dict(one.state_dict())
        payloads = [
            scheme.codec.encode_payload(flat, flat.numel(), key=step).bytes
            for scheme in ((one,) if step < 2 else (one, other))
        ]
        assert all(torch.equal(payloads[0], payload) for payload in payloads)
        for scheme in (one, other):
            scheme.codec.end_step()
    ours, theirs = (scheme.state_dict()["threshold"] for scheme in (one, other))
    assert torch.equal(ours["levels"], theirs["levels"])
    assert torch.equal(ours["numbers"], theirs["numbers"]) and ours["numbers"][1] != 1


@pytest.mark.parametrize(
    "state",
    (
        3,
        {"numbers": torch.tensor([0.0, 1.0, 64.0])},
        {"levels": torch.tensor([math.nan]), "numbers": torch.tensor([0.0, 1.0, 64.0])},
        {"levels": torch.tensor([-math.inf]), "numbers": torch.tensor([0.0, 1.0, 64.0])},
        {"levels": torch.tensor([1.0]), "numbers": torch.tensor([math.inf, 1.0, 64.0])},
        {"levels": torch.tensor([1.0]), "numbers": torch.tensor([0.0, 5.0, 64.0])},
        {"levels": torch.tensor([1.0]), "numbers": torch.tensor([0.0, 1.0])},
    ),
)
def test_wrong_states(state):
    scheme = EDEN(bits=1, allocation="waterfill")
    with pytest.raises(ValueError, match="state"):
        scheme.load_state_dict(scheme.state_dict() | {"threshold": state})


def test_changed_bits_start_anew():
    scheme = EDEN(bits=1, allocation="waterfill")
    flat = torch.randn(9000, generator=torch.Generator().manual_seed(0))
    scheme.codec.encode_payload(flat, flat.numel(), key=1)
    scheme.codec.end_step()
    assert scheme.codec.threshold.multiplier
    scheme.set(checksum=False)
    assert scheme.codec.threshold.multiplier
    scheme.set(bits=2)
    assert scheme.codec.threshold.multiplier is None
