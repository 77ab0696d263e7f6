"""Every scheme's decoded values against their exact law, and payloads against a reader that was
written from docs/wire_format.md alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import hvd_adaptive
from oracle import cases
from oracle.averages import Expected
from oracle.in_force import known_of, quantiser_of, wire
from oracle.laws import law_of
from oracle.rounding import of_quantised
from oracle.verdict import Judge

DRAWS = 12


def made(compressor: cases.Compressor, law: str, fit: bool):
    """A compressor, fitted to another vector of the law where its scheme fits anything."""
    name, keywords = compressor
    codec = getattr(hvd_adaptive, name)(**keywords)
    if fit and hasattr(codec, "fit"):
        codec.fit(torch.from_numpy(cases.vector(law, 4000, 7)).float())
    return codec


def expected_of(codec, flat: torch.Tensor, quantised: int) -> tuple[Expected, np.ndarray]:
    """The law of the first coordinates, and the others as they are."""
    values = flat[:quantised].to(torch.float32).double().numpy()
    law = law_of(quantiser_of(codec, values), values)
    return Expected(law, of_quantised([law], str(flat.dtype))), flat[quantised:].double().numpy()


def judged(codec, flat: torch.Tensor, seed: int) -> list[str]:
    """What is wrong with several payloads of a vector."""
    size, full = codec.settings.bucket_size, codec.settings.tail == "full"
    quantised = flat.numel() - flat.numel() % size if full else flat.numel()
    expected, exact = expected_of(codec, flat, quantised)
    judge = Judge(seed)
    for draw in range(DRAWS):
        values = codec.decode(codec.encode(flat, seed=seed + draw)).double().numpy()
        np.testing.assert_array_equal(values[quantised:], exact)
        judge.see(draw, values[:quantised], expected, {"all": np.arange(quantised)})
    return judge.end()


@st.composite
def vectors(draw: st.DrawFn) -> tuple[str, int, int, str, bool, float]:
    """Law, length, seed, dtype, whether a coordinate is not finite, and size."""
    return (
        draw(st.sampled_from(cases.LAWS)),
        draw(st.one_of(st.integers(1, 300), st.integers(300, 3000))),
        draw(st.integers(0, 2**31)),
        draw(st.sampled_from(cases.DTYPES)),
        draw(st.integers(0, 4)) == 0,
        draw(st.sampled_from([1.0, 1.0, 1e-30, 1e-9, 1e20])),
    )


def tensor(law: str, count: int, seed: int, dtype: str, broken: bool, size: float) -> torch.Tensor:
    """float16 has room for sizes around 1 alone."""
    flat = torch.from_numpy(cases.vector(law, count, seed))
    if dtype != "float16":
        flat *= size
    if broken:
        flat[seed % count] = torch.inf if seed % 2 else torch.nan
    return flat.to(getattr(torch, dtype))


@pytest.mark.many
@pytest.mark.parametrize("part", range(4))
def test_decoded_values_follow_their_exact_law(part):
    @seed(part)
    @settings(max_examples=50)
    @given(cases.compressors(), vectors(), st.booleans())
    def check(compressor, drawn, fit):
        assert judged(made(compressor, drawn[0], fit), tensor(*drawn), drawn[2]) == []

    check()


@settings(max_examples=60)
@given(cases.compressors(), vectors(), st.booleans())
def test_a_plain_reader_decodes_the_same_values(compressor, drawn, fit):
    codec, flat = made(compressor, drawn[0], fit), tensor(*drawn)
    payload = codec.encode(flat, seed=drawn[2])
    head, values = wire.decode(payload.numpy().tobytes(), known_of(codec))
    assert head["checksum"] == wire.checksum(payload.numpy().tobytes())
    decoded, quantised = codec.decode(payload), head["coordinates"] - head["full"]
    read = torch.from_numpy(values)
    read[:quantised] = read[:quantised].to(flat.dtype).double()
    # QCS: sums of float32 in another order.
    is_qcs, largest = codec.parts.default.name == "qcs", np.nanmax(np.abs(values), initial=0.0)
    most = {"rtol": 2.0**-7, "atol": 1e-5 * float(largest)} if is_qcs else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(decoded.double(), read, equal_nan=True, **most)
