"""Tables fitted to gradients that are mostly zero are fitted again soon, and not for ever."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact_errors import relative_error
from feedback_steps import OneRank
from states import through_disk

from hvd_adaptive import ALQ, AMQ, ECDQ, QSGD

SIZES = [900, 900] * 8  # A and B of an adapter, in turn; a bucket holds both
BUCKET = 1000
RETRIES = [1, 3, 7, 15, 31, 63]


def gradients(step: int, without: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Of one step; A's law is not B's. Zeros in slots of ``without``."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(size, generator=generator) for size in SIZES]
    return [
        torch.zeros_like(g) if slot in without else (g.exp() if slot % 2 == 0 else 0.01 * g)
        for slot, g in enumerate(drawn)
    ]


def make(scheme=ALQ, **keywords):
    keywords = {"bits": 8, "update_steps": [0], "samples": 20} | keywords
    return scheme(bucket_size=BUCKET, min_numel=0, **keywords)


class Run:
    """A lone rank whose tables are refitted as in training."""

    def __init__(self, compressor) -> None:
        self.rank = OneRank(compressor, SIZES)
        self.due: list[int] = []

    def step(self, own: list[torch.Tensor]) -> int:
        """The table's version once the step's update has been made."""
        compressor, step = self.rank.compressor, self.rank.begin()
        for slot, gradient in enumerate(own):
            step.arrive(slot, gradient)
        if compressor._training.updates.due(step.number):
            self.due.append(step.number)
        if compressor._training.updates.at(step.number).samples:
            compressor._training.updates.run(
                step.number,
                step.samples,
                lambda vector, fit: fit([vector]),
                step.parts,
            )
        compressor.step += 1
        return compressor.parts.default.table_version


def flat(own: list[torch.Tensor]) -> np.ndarray:
    return torch.cat(own).numpy()


A = tuple(range(0, len(SIZES), 2))


def excess(run: Run, step: int, keywords: dict) -> float:
    """The error at ``step`` over that of a table that is fitted to this very gradient."""
    fresh = make(**keywords)
    fresh.fit(gradients(step))
    found, best = (
        relative_error(flat(gradients(step)), c.levels.numpy(), BUCKET)
        for c in (run.rank.compressor, fresh)
    )
    return found / best


@pytest.mark.parametrize("keywords", [{}, {"statistics": "normal", "bits": 5}], ids=repr)
def test_adapters_whose_first_gradients_are_zero(keywords):
    """Every bucket that is sampled at step 0 has a gradient, of B alone. The next fits are based on
    such buckets, too, until step 0 is no longer among the last eight steps."""
    run, later = Run(make(**keywords)), Run(make(**keywords | {"update_steps": [15]}))
    found = {}
    for step in range(70):
        version = run.step(gradients(step, A if step == 0 else ()))
        later.step(gradients(step, A if step == 0 else ()))
        found[step] = excess(run, step, keywords) if step in (1, 3) else 1.0
    assert found[1] <= 1.3 and found[3] <= 1.03
    assert torch.equal(run.rank.compressor.levels, later.rank.compressor.levels)
    assert run.due == [0, 1, 3, 7, 15] and version == 5, "nothing is left to wait for"


def test_adapters_with_a_table_for_each_tensor():
    run = Run(make(bits=3, scope="tensor"))
    run.step(gradients(0, A))
    run.step(gradients(1))
    versions = [run.rank.compressor.parts[chr(97 + slot)].table_version for slot in range(4)]
    assert versions == [1, 2, 1, 2] and run.due == [0, 1]


@pytest.mark.parametrize("scheme", [ALQ, AMQ, "ecdq", "book"])
def test_layers_that_never_have_a_gradient(scheme):
    """Frozen ones, or rows of an embedding: looked at after 1, 2, 4, ... steps, fitted once."""
    makers = {
        "ecdq": lambda: make(ECDQ, bits=3.0),
        "book": lambda: make(QSGD, bits=4, coding="huffman"),
    }
    run = Run(makers[scheme]() if scheme in makers else make(scheme))
    for step in range(64):
        assert run.step(gradients(step, A)) == 1
    assert run.due == [0, *RETRIES]


def test_a_layer_that_is_thawed_later():
    run = Run(make())
    versions = [run.step(gradients(step, A if step < 20 else ())) for step in range(70)]
    assert versions == [1] * 31 + [2] * 39 and run.due == [0, 1, 3, 7, 15, 31]


def test_planned_updates_are_made_whatever_there_is():
    run = Run(make(update_steps=[0, 5, 10]))
    versions = [run.step(gradients(step, A)) for step in range(20)]
    assert [step for step in range(20) if versions[step] != ([0, *versions])[step]] == [0, 5, 10]


def test_a_planned_update_is_made_without_the_buckets_that_overflow():
    """Its retry finds nothing that is worth another one."""
    run = Run(make(update_steps=[0, 10]))
    overflow = gradients(10, A)
    overflow[1][3] = float("inf")
    versions = [run.step(overflow if s == 10 else gradients(s, A)) for s in range(13)]
    assert versions == [1] * 10 + [2] * 3


@pytest.mark.parametrize("first", [0, 3], ids="overflow from step {}".format)
def test_steps_of_which_most_overflows_do_little_harm(first):
    """As steps that AMP skips until its scale has become small enough; what is left is one layer.

    The scale halves at each of them, which changes no table.
    """
    run, calm = (Run(make(bits=4, update_steps=None)) for _ in range(2))
    for step in range(9):
        own = gradients(step)
        calm.step(own)
        if first <= step < first + 3:
            scale = 2.0 ** (16 - step)
            own = [scale * g if slot == 0 else g * torch.nan for slot, g in enumerate(own)]
        run.step(own)
    assert run.rank.compressor.parts.default.table_version > 1
    assert excess(run, 8, {"bits": 4}) <= 1.1 * excess(calm, 8, {"bits": 4})


@pytest.mark.parametrize("old", [False, True])
def test_state_goes_on_with_the_row_of_retries(old):
    """States from before hold no share: they lead to one more fit at most."""
    run = Run(make())
    for step in range(10):
        run.step(gradients(step, A))
    state = through_disk(run.rank.compressor.state_dict())
    if old:
        del state["share"], state["schedule"]["again"]
    other = Run(make())
    other.rank.compressor.load_state_dict(state)
    versions = [other.step(gradients(step, A)) for step in range(10, 100)]
    assert other.due == [15, 31, 63]
    assert versions == ([1] * 5 + [2] * 85 if old else [1] * 90)


def test_rank_one_follows_from_the_broadcast_alone():
    """What a rank does at and after an update is the same whatever it saw itself."""
    first, other = Run(make()), Run(make())
    sent: list[np.ndarray] = []

    def fits(own, fit):
        sent.append(fit([own]))
        return sent[-1]

    def takes(own, fit):
        return sent[-1]

    for step in range(40):
        own, elsewhere = gradients(step, A if step < 5 else ()), gradients(step)
        due = [run.rank.compressor._training.updates.at(step).samples for run in (first, other)]
        assert due[0] == due[1]
        if due[0]:
            for run, seen, meet in ((first, own, fits), (other, elsewhere, takes)):
                now = run.rank.begin()
                for slot, gradient in enumerate(seen):
                    now.arrive(slot, gradient)
                run.rank.compressor._training.updates.run(step, now.samples, meet, now.parts)
        states = [run.rank.compressor.state_dict() for run in (first, other)]
        assert states[0]["schedule"] == states[1]["schedule"]
        assert states[0].get("share") == states[1].get("share")
        assert torch.equal(states[0]["table"]["magnitudes"], states[1]["table"]["magnitudes"])
    assert first.rank.compressor.parts.default.table_version > 1
