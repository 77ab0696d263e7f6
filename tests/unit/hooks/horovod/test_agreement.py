"""What ranks differ in, in words."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from hvd_adaptive import ALQ, ORQ, QSGD
from hvd_adaptive.hooks.horovod import agreement
from hvd_adaptive.hooks.horovod.placeholder import disagreement, position
from hvd_adaptive.run.agreement import ADVICE, LONGEST, describe, differences


def described(compressor, **shapes: list[int]):
    parameters = [(name, torch.nn.Parameter(torch.zeros(s))) for name, s in shapes.items()]
    return describe(compressor, parameters)


def test_equal_ranks_differ_in_nothing():
    own = described(ALQ(bits=3), w=[2, 3])
    assert differences([own] * 5, range(5)) == "" and json.loads(json.dumps(own)) == own
    # The order of parameters does not count.
    both = [described(QSGD(bits=3), a=[1], b=[2]), described(QSGD(bits=3), b=[2], a=[1])]
    assert json.dumps(both[0]) == json.dumps(both[1])


def test_runs_of_ranks_are_told_short():
    everyone = [described(QSGD(bits=2 + (rank in (3, 5, 6, 7)))) for rank in range(9)]
    assert "bits is 2 on ranks 0-2, 4, 8, 3 on ranks 3, 5-7" in differences(everyone, range(9))


def test_each_topic_is_a_sentence():
    everyone = [described(ALQ(bits=3, seed=s), w=[2, n]) for s, n in ((1, 3), (1, 3), (2, 4))]
    everyone[2]["the package version"] = {"hvd_adaptive": "0.0.9"}
    version = everyone[0]["the package version"]["hvd_adaptive"]
    assert differences(everyone, [4, 6, 7]) == (
        f"ranks disagree on the package version: hvd_adaptive is {version} on ranks 4, 6, 0.0.9 on "
        "rank 7. ranks disagree on settings: seed is 1 on ranks 4, 6, 2 on rank 7. ranks disagree "
        f"on parameters: w is float32 [2, 3] on ranks 4, 6, float32 [2, 4] on rank 7. {ADVICE}"
    )


def test_a_scheme_is_not_blamed_for_the_keywords_of_another():
    told = differences([described(QSGD(bits=3)), described(ORQ(levels=5))], [0, 1])
    assert "scheme is 'QSGD' on rank 0, 'ORQ' on rank 1" in told
    assert "missing" not in told and "levels" not in told


def test_many_and_long_differences_are_cut():
    shapes = {f"layer{i}": [i + 1] for i in range(50)}
    told = differences([described(QSGD(bits=3), **shapes), described(QSGD(bits=3))], [0, 1])
    assert "; and 46 more" in told
    long = {f"a{i}*": 4 for i in range(100)}
    everyone = [described(QSGD(bits=3, parameter_bits=long | {"last": bits})) for bits in (4, 5, 5)]
    told = differences(everyone, range(3))
    values = told.partition("parameter_bits is ")[2].partition(". Every")[0]
    one, rest = values.split(" on rank 0, ")
    other = rest.removesuffix(" on ranks 1-2")
    assert one != other and len(one) == len(other) <= LONGEST


class World:
    """Rank 0 of two, of which the other one sends what this one sends, or ends otherwise."""

    size, rank, is_left = 2, 0, False

    def __init__(self, end: str) -> None:
        self.end, self.asked = end, 0
        self.process_set = SimpleNamespace(ranks=[0, 1])

    def allgather(self, data, name):
        self.asked += 1
        return torch.cat([data] * self.size)

    def poll(self, handle):
        self.is_left = self.end == "the step is given up"
        return self.end not in ("no answer", "the step is given up")

    def synchronize(self, handle):
        if self.end != "the same settings":
            raise RuntimeError(self.end)
        return handle


def find_out(world: World) -> str:
    """What ranks find that differ in the step."""
    groups = SimpleNamespace(name="test.0", prepare=lambda step: None)
    own = agreement.Agreement(QSGD(bits=3), None, world)
    return own.find_out(groups, 0, reduced(0, (5, 6), (9, 9)))


@pytest.mark.parametrize(
    "end",
    [
        "the same settings",
        "no answer",
        "the step is given up",
        "Allgather is not supported with Join at this time.",
    ],
)
def test_ranks_that_cannot_find_out_ask_once(end, monkeypatch):
    monkeypatch.setattr(agreement, "SECONDS", 0.01 if end == "no answer" else 60.0)
    world = World(end)
    assert find_out(world) == "" and world.asked == 1


def test_an_error_of_the_network_is_raised():
    with pytest.raises(RuntimeError, match="a rank died"):
        find_out(World("a rank died"))


def reduced(slot: int, steps: tuple[int, ...], marks: tuple[int, ...], turned: int = 0):
    """The sum of positions of ranks at these steps and with these fingerprints."""
    ranks = enumerate(zip(steps, marks, strict=True))
    return sum(position(r, slot + turned * r, step, mark) for r, (step, mark) in ranks)


def test_a_disagreement_has_one_name_whatever_gradient_shows_it():
    names = {disagreement(reduced(slot, (5, 5, 6), (9, 9, 9)), 3) for slot in range(20)}
    other = disagreement(reduced(3, (5, 5, 5), (9, 9, 2**20)), 3)
    assert len(names) == 1 and None not in {*names, other} and other not in names
    assert disagreement(reduced(1, (5, 6, 5), (9, 9, 9), turned=1) / 3, 3) in names


def test_an_order_that_differs_is_not_told_by_every_gradient():
    assert disagreement(reduced(1, (5, 5), (9, 9), turned=1), 2) is None
    assert disagreement(reduced(1, (5, 5), (9, 9)), 2) is None
