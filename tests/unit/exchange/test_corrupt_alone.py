"""A message that arrives damaged at one rank alone ends the step on all of them."""

from __future__ import annotations

import pytest
import torch
from late_ranks import run
from test_ownership import EXCHANGES, SHAPES, drawn

from hvd_adaptive import QSGD, Hierarchical, PayloadError, Tuning
from hvd_adaptive.coding.header import SIZE

RANKS = 4
KEYWORDS = {"bits": 4, "bucket_size": 256, "fusion_bytes": 40_000}


def flipped(data: torch.Tensor) -> torch.Tensor:
    data = data.clone()
    data[min(SIZE + 5, data.numel() - 1)] ^= 16
    return data


DAMAGES = {"flipped": flipped, "truncated": lambda data: data[:-9], "gone": lambda data: data[:0]}


def stages(exchange, **own) -> list[str]:
    """Names of a step's collectives whose messages are not empty, in some order."""
    names: set[str] = set()

    def look(name, sender, receiver, part):
        if part.numel():
            names.add(name)
        return part

    run(make(exchange, **own), SHAPES["biases"], drawn(SHAPES["biases"], RANKS, 1), damage=look)
    return sorted(names)


def make(exchange, **own):
    return lambda: QSGD(**KEYWORDS | EXCHANGES[exchange] | own)


def local(exchange: str, name: str) -> bool:
    """Whether the stage is one of floats inside a node, which have no checksum."""
    stage = int(name.rpartition(".stage")[2]) if ".stage" in name else 0
    return stage in {"pairs": (0, 2), "all": (0, 1)}.get(exchange, ())


def check(exchange, name, damage, receiver, **own):
    """Every rank raises the same error, which names the rank, and has no gradient left."""
    shapes, done = SHAPES["biases"], []

    def hit(at, sender, to, part):
        if at == name and to == receiver and part.numel() and not done:
            done.append(sender)
            return damage(part)
        return part

    gradients = drawn(shapes, RANKS, 2)
    outcomes = run(make(exchange, **own), shapes, gradients, damage=hit)
    assert done
    told = {str(outcome[0]) for outcome in outcomes}
    assert len(told) == 1 and all(isinstance(o[0], PayloadError) for o in outcomes), told
    (message,) = told
    assert f"corrupt at rank {receiver} (group" in message and "step 0" in message
    for of_rank in gradients[0]:
        assert all(bool(gradient.isnan().all()) for gradient in of_rank)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_rank_raises(exchange, damage):
    """Whichever stage of whichever group it was, and whoever received it."""
    names = stages(exchange)
    assert len(names) >= 3
    for number, name in enumerate(names if damage == "flipped" else names[::6]):
        if damage != "flipped" or not local(exchange, name):
            check(exchange, name, DAMAGES[damage], receiver=number % RANKS)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_groups_that_wait_for_memory_still_set_out(exchange):
    """Two groups are in flight at a time: the rank that failed sends the others'."""
    plain = isinstance(EXCHANGES[exchange]["exchange"], Hierarchical)
    own = {"tuning": Tuning(in_flight_bytes=80_000 if plain else 24_000), "fusion_bytes": 16_000}
    names = stages(exchange, **own)
    assert len({name.split(".")[1] for name in names}) > 4
    for name in (names[0], names[-1]):
        check(exchange, name, DAMAGES["gone"], receiver=1, **own)


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce", "pairs"])
def test_several_ranks_at_once(exchange):
    """All of them are named; those that were told by others are not."""
    shapes, hit = SHAPES["biases"], {1, 2}
    name = stages(exchange)[0]

    def damage(at, sender, to, part):
        return part[:0] if at == name and to in hit and sender == 0 else part

    outcomes = run(make(exchange), shapes, drawn(shapes, RANKS, 1), damage=damage)
    told = {str(outcome[0]) for outcome in outcomes}
    assert len(told) == 1
    if exchange == "allgather":
        assert "at rank 1 (group" in told.pop()
