"""ALQ.encode and decode: tables, seeds, inputs of all kinds, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_adaptive import ALQ

SEVEN = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1]
EIGHT = [-1, -0.5, -0.25, -0.1, 0.1, 0.25, 0.5, 1]

TABLES = {
    "not increasing": [*EIGHT[:3], -0.05, -0.1, *EIGHT[5:]],
    "equal levels": [-1, -0.5, -0.5, -0.1, 0.1, 0.5, 0.5, 1],
    "descending": EIGHT[::-1],
    "too few": EIGHT[1:-1],
    "too many": [*EIGHT[:4], 0.0, *EIGHT[4:]],
    "none": [],
    "not symmetric": [*EIGHT[:-2], 0.6, 1],
    "tiny, not symmetric": [-1, -0.5, -1e-12, 0, 2e-7, 0.5, 1],
    "tiny, four not symmetric": [-1, -0.5, -0.2, -(2**-40), 2**-23, 0.2, 0.5, 1],
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


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("symmetric", (True, False))
def test_wrong_tables(kind, symmetric):
    with pytest.raises(ValueError, match="table"):
        ALQ(bits=3, symmetric=symmetric, table=TABLES[kind])


@pytest.mark.parametrize(
    ("symmetric", "table", "told"),
    [
        (True, SEVEN, "must be positive if symmetric=True"),
        (False, EIGHT, "must be zero if symmetric=False"),
        (False, [-1, 0, 1], "must have 7 levels for bits=3"),
    ],
)
def test_tables_of_the_other_form(symmetric, table, told):
    with pytest.raises(ValueError, match=f"table: .*{told}"):
        ALQ(bits=3, symmetric=symmetric, table=table)


def test_good_tables_are_taken_as_they_are():
    for table in (EIGHT, tuple(EIGHT), np.array(EIGHT), torch.tensor(EIGHT, dtype=torch.float64)):
        compressor = ALQ(bits=3, symmetric=True, table=table)
        assert compressor.levels.dtype == torch.float64
        assert compressor.levels.tolist() == EIGHT
    assert ALQ(bits=3, table=SEVEN).levels.tolist() == SEVEN


@pytest.mark.parametrize("bits", [3, 5, 8])
def test_a_table_may_be_symmetric_up_to_rounding(bits):
    """torch.linspace(-1, 1, 31) has -5e-8 for 0, and pairs that differ in their last bits."""
    count = 2**bits - 1
    levels = ALQ(bits=bits, table=torch.linspace(-1, 1, count)).levels
    assert levels[count // 2] == 0 and torch.equal(levels, -levels.flip(0))
    exact = torch.arange(-(count // 2), count // 2 + 1, dtype=torch.float64) / (count // 2)
    assert float((levels - exact).abs().max()) < 1e-7


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


BUCKET = 100


def gradient(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([0, n]).standard_normal(n)).to(dtype)


def test_inputs_are_neither_changed_nor_kept():
    compressor, flat = ALQ(bits=3, bucket_size=BUCKET), gradient(1234)
    before = flat.clone()
    payload = compressor.encode(flat, seed=0)
    copy = payload.clone()
    decoded = compressor.decode(payload)
    assert torch.equal(flat, before) and torch.equal(payload, copy)
    flat.zero_()
    payload.zero_()
    assert torch.equal(decoded, compressor.decode(copy))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("tail", ("quantize", "full"))
def test_non_contiguous_and_differentiable_inputs(dtype, tail):
    compressor = ALQ(bits=3, bucket_size=BUCKET, tail=tail)
    whole = gradient(2 * 777, dtype)
    want = compressor.encode(whole[::2].clone(), seed=0)
    assert torch.equal(compressor.encode(whole[::2], seed=0), want)
    column = whole.view(777, 2)[:, 0]
    assert torch.equal(compressor.encode(column, seed=0), want)
    tracked = whole[::2].clone().requires_grad_()
    assert torch.equal(compressor.encode(tracked * 1, seed=0), want)
    assert torch.equal(compressor.encode(tracked, seed=0), want)
    assert torch.equal(
        compressor.encode(whole[1:][1::2], seed=0), compressor.encode(whole[2::2], seed=0)
    )
    assert not compressor.decode(want).requires_grad
    expanded = torch.ones(1, dtype=dtype).expand(300)
    assert compressor.decode(compressor.encode(expanded, seed=0)).shape == (300,)


def test_global_generators_are_untouched():
    torch.manual_seed(1)
    np.random.seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    compressor, flat = ALQ(bits=3, bucket_size=BUCKET), gradient(5000)
    compressor.decode(compressor.encode(flat))
    compressor.fit(flat)
    compressor.decode(compressor.encode(flat, seed=4))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
