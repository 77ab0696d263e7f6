"""States that are no state: ValueError, and the compressor is what it was."""

from __future__ import annotations

import copy
import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scheme_cases import EVERY
from states import plain
from test_reachable_states import Run, build

from hvd_adaptive.optim import QSVRG, Portion

FLAT = torch.linspace(-1, 1, 1200) ** 3
MISSING = object()
# What a damaged entry may hold; none of these is an entry's value.
WRONG = {
    "missing": MISSING,
    "None": None,
    "a string": "x",
    "-7": -7,
    "1.5": 1.5,
    "a list": [],
    "a dict": {},
    "nan": torch.full((4,), torch.nan),
    "a matrix": torch.ones(3, 2),
    "a scalar": torch.tensor(0.5),
    "huge": 2**63,
    "True": True,
}
# Entries that a state may lack (older versions' states do), and values that do say something.
OPTIONAL = {
    *("settings", "instance", "scope", "parameter_bits", "second_stage"),
    *("second_schedule", "residuals", "residuals_checksum", "probabilities", "a", "share"),
    *("again", "norm", "requested"),
}
ALLOWED = {
    ("parameter_bits", "None"),
    ("settings", "a dict"),
    ("scope", "missing"),
    ("code", "a list"),
    ("parameters", "a dict"),
    ("settings/bucket_size", "missing"),
}


def used(name: str, steps: int = 1) -> Any:
    """A compressor after some steps, of which another number changes nearly every entry."""
    label, _, kind = name.partition(" ")
    exchange = "scatter_reduce" if kind == "second" else "allgather"
    run = Run(build(label, kind.removeprefix("second"), exchange), torch.float32)
    for _ in range(steps):
        run.step([["normal"] * 4] * 2)
        run.compressor.encode(FLAT)
    run.compressor.load_state_dict(run.states()[-1])
    run.compressor.set(bucket_size=2 * run.compressor.settings.bucket_size)
    return run.compressor


NAMES = [
    *EVERY,
    *(f"alq-3 {kind}" for kind in ("parts", "huffman", "feedback", "second")),
    *("qsgd-3 huffman", "ecdq-3 parts", "amq-3 second"),
]


def paths(state: dict, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in state.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


def damaged(state: dict, path: tuple[str, ...], value: Any) -> dict:
    state = copy.deepcopy(state)
    inside = state
    for name in path[:-1]:
        inside = inside[name]
    if value is MISSING:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return state


def is_allowed(path: tuple[str, ...], kind: str) -> bool:
    ends = {path[-1], "/".join(path[-2:])}
    return any((end, kind) in ALLOWED for end in ends) or (
        kind == "missing" and path[-1] in OPTIONAL
    )


def refused(compressor: Any, state: Any) -> bool:
    """Whether it is, with a ValueError; then the compressor must be what it was."""
    before, codes = plain(compressor.state_dict()), compressor.encode(FLAT, seed=3)
    try:
        compressor.load_state_dict(state)
    except ValueError as error:
        assert str(error)
        assert plain(compressor.state_dict()) == before
        assert torch.equal(compressor.encode(FLAT, seed=3), codes)
        return True
    return False


@pytest.mark.many
@pytest.mark.parametrize("name", NAMES)
def test_every_entry_is_checked(name):
    state = used(name).state_dict()
    compressor, accepted = used(name, steps=2), []
    assert all(refused(compressor, no_mapping) for no_mapping in (None, [], "x", 3, {}))
    for path in paths(state):
        for kind, value in WRONG.items():
            if not refused(compressor, damaged(state, path, value)):
                accepted.append((path, kind))
                compressor = used(name, steps=2)
    wrongly = [one for one in accepted if not is_allowed(*one)]
    assert not wrongly
    compressor.load_state_dict(state)
    assert plain(compressor.state_dict()) == plain(state)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_a_snapshot(name):
    compressor, other = used(name), used(name)
    state = compressor.state_dict()
    kept = plain(state)
    other.load_state_dict(state)
    for path in paths(state):
        value = functools.reduce(operator.getitem, path, state)
        if isinstance(value, torch.Tensor):
            value.zero_()
    assert plain(compressor.state_dict()) == plain(other.state_dict()) == kept


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.lists(st.floats(), max_size=9).map(torch.tensor),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_no_other_error_whatever_a_state_holds(data):
    name = data.draw(st.sampled_from(NAMES))
    compressor = used(name)
    state = compressor.state_dict()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(sorted(paths(state))))
        state = damaged(state, path, data.draw(anything | st.just(MISSING)))
    if not refused(compressor, state):
        again = compressor.state_dict()
        used(name).load_state_dict(again)


def test_states_of_qsvrg():
    portion = Portion(3, lambda x, index: x)
    run = QSVRG(torch.ones(6), [portion], lr=0.1, iterations=2)
    run.epoch()
    state, point = run.state_dict(), run.point.clone()
    for name in state:
        for kind, value in WRONG.items():
            with pytest.raises(ValueError, match="state"):
                run.load_state_dict(damaged(state, (name,), value))
            assert torch.equal(run.point, point) and run.epochs == 1, (name, kind)
    with pytest.raises(ValueError, match="state: must be a mapping"):
        run.load_state_dict(json.loads("[]"))
