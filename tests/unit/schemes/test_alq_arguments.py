"""Wrong arguments: each its own error that names the keyword, the value and what is allowed."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from hvd_adaptive import ALQ, ScatterReduce, Tuning

SEVEN = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1]
EIGHT = [-1, -0.5, -0.25, -0.1, 0.1, 0.25, 0.5, 1]

WRONG = [
    *(("bits", v, "from 2 to 8") for v in (1, 9, 0, -3, 3.0, True, "3", None, 10**30, [3])),
    *(
        ("bucket_size", v, ">= 1|from 1 to")
        for v in (100.5, 0, -1, 8192.0, True, "8192", None, 2**64, Fraction(9), np.float32(9))
    ),
    *(("norm", v, "'l2', 'linf'") for v in ("l1", "L2", 2, None, True, ["l2"])),
    *(("solver", v, "'coordinate_descent'") for v in ("cd", None, 0, "", ["x"])),
    *(("statistics", v, "'histogram', 'normal'") for v in ("moments", None, 1, ["x"])),
    *(("normalized", v, "True or False") for v in (1, None, "yes")),
    *(("symmetric", v, "True or False") for v in (0, None, "no")),
    *(("samples", v, ">= 1") for v in (0, -1, 2.5, True, None)),
    *(("seed", v, "0 to") for v in (-1, 0.5, None, True, 2**64)),
    *(("min_numel", v, ">= 0") for v in (-1, 1.5, None)),
    *(("tail", v, "'quantize', 'full'") for v in ("drop", None, True, ["x"])),
    *(("coding", v, "'fixed'") for v in ("zip", None)),
    *(("exchange", v, "'allgather'") for v in ("ring", 3, Tuning(), ScatterReduce, {"auto": {}})),
    *(
        ("error_feedback", v, "above 0 and at most 1, 'auto', or None")
        for v in ("yes", 0, -0.5, 1.5, float("nan"), float("inf"), True, [1.0])
    ),
    *(("fusion_bytes", v, ">= ") for v in (0, 1.5, None)),
    *(("tuning", v, "a Tuning, such as") for v in (None, True, {"worker": False}, "fast")),
    *(("warmup_steps", v, ">= 0") for v in (-1, 0.5, None)),
    *(("update_steps", v, "ascending steps|callable") for v in (5, "often", b"ab", 2.5)),
    *(("update_steps", v, "ascending steps") for v in ([-1], [0.5], ["a"], [True], [None])),
]


@pytest.mark.parametrize("keyword", dict.fromkeys(name for name, _, _ in WRONG))
def test_value_error_names_keyword_value_and_what_is_allowed(keyword):
    for name, value, allowed in WRONG:
        if name != keyword:
            continue
        with pytest.raises(ValueError) as caught:
            ALQ(**{name: value})
        message = str(caught.value)
        shown = value[0] if isinstance(value, list) and name == "update_steps" else value
        assert name in message and repr(shown) in message and re.search(allowed, message), message


@pytest.mark.parametrize(
    "steps", ([0, 100, 2.5], [5, "a"], {0, None}, [0, 100, -1], (0, 10, True)), ids=repr
)
def test_wrong_steps_in_a_collection_are_told_at_construction(steps):
    with pytest.raises(ValueError, match="update_steps"):
        ALQ(update_steps=steps)


TABLES = {
    "not increasing": [*EIGHT[:3], -0.05, -0.1, *EIGHT[5:]],
    "equal levels": [-1, -0.5, -0.5, -0.1, 0.1, 0.5, 0.5, 1],
    "descending": EIGHT[::-1],
    "too few": EIGHT[1:-1],
    "too many": [*EIGHT[:4], 0.0, *EIGHT[4:]],
    "none": [],
    "not symmetric": [*EIGHT[:-2], 0.6, 1],
    "not a number": [-1, float("nan"), -0.25, -0.1, 0.1, 0.25, float("nan"), 1],
    "infinite": [-float("inf"), *EIGHT[1:-1], float("inf")],
    "beyond one": [2 * v for v in EIGHT],
    "below one": [v / 2 for v in EIGHT],
    "equal in float32": [-1, -(1 - 1e-12), -0.25, -0.1, 0.1, 0.25, 1 - 1e-12, 1],
    "two rows": [EIGHT[:4], EIGHT[4:]],
    "a number": 0.5,
    "a word": "uniform",
    "words": ["a"] * 8,
    "ragged": [[1, 2], [3]],
}


@pytest.mark.parametrize("kind", [*TABLES, "zero-based"])
def test_wrong_tables(kind):
    table = TABLES.get(kind, SEVEN)
    for symmetric in (True, False)[: 2 - (table is SEVEN)]:
        with pytest.raises(ValueError, match="table"):
            ALQ(bits=3, symmetric=symmetric, table=table)


@pytest.mark.parametrize(
    ("table", "told"),
    [(EIGHT, "must be zero if symmetric=False"), ([-1, 0, 1], "must have 7 levels for bits=3")],
)
def test_wrong_tables_for_a_zero_based_compressor(table, told):
    with pytest.raises(ValueError, match=f"table: .*{told}"):
        ALQ(bits=3, table=table)


def test_good_tables_are_taken_as_they_are():
    for table in (EIGHT, tuple(EIGHT), np.array(EIGHT), torch.tensor(EIGHT, dtype=torch.float64)):
        compressor = ALQ(bits=3, symmetric=True, table=table)
        assert compressor.levels.dtype == torch.float64
        assert compressor.levels.tolist() == EIGHT
    assert ALQ(bits=3, table=SEVEN).levels.tolist() == SEVEN


def test_unknown_keywords_and_positional_arguments():
    with pytest.raises(TypeError, match=r"bit_width.*bucket_size"):
        ALQ(bit_width=3)
    with pytest.raises(TypeError):
        ALQ(3)


@pytest.mark.parametrize(
    ("flat", "said"),
    (
        (torch.zeros(2, 3), "shape"),
        (torch.tensor(1.0), "shape"),
        (torch.zeros(3, dtype=torch.int64), "int64"),
        (torch.zeros(3, dtype=torch.bool), "bool"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        (np.zeros(3), "ndarray"),
        ([1.0, 2.0], "list"),
        (None, "NoneType"),
    ),
    ids=str,
)
def test_wrong_input_of_encode(flat, said):
    with pytest.raises(ValueError, match="flat") as caught:
        ALQ().encode(flat)
    assert said in str(caught.value)


@pytest.mark.parametrize("seed", (-1, 2**64, 1.5, "1", True), ids=repr)
def test_wrong_seed_of_encode(seed):
    with pytest.raises(ValueError, match="seed"):
        ALQ().encode(torch.ones(10), seed=seed)


def test_integers_of_numpy_mean_what_ints_mean():
    plain = {"bits": 3, "bucket_size": 100, "seed": 5, "samples": 7, "min_numel": 10}
    one, two = ALQ(**plain), ALQ(**{name: np.int64(value) for name, value in plain.items()})
    flat = torch.linspace(-1, 1, 1000)
    payload = two.encode(flat, seed=np.uint64(3))
    assert torch.equal(payload, one.encode(flat, seed=3))
    assert torch.equal(one.decode(payload), two.decode(payload))
    assert one.parts.default.settings_fingerprint == two.parts.default.settings_fingerprint
    assert type(two.state_dict()["table"]["bits"]) is int


def test_wrong_named_parameters():
    for value in ([torch.nn.Parameter(torch.zeros(3))], [("a",)], [(1, torch.zeros(3))]):
        with pytest.raises(ValueError, match="named_parameters"):
            ALQ(named_parameters=value)
