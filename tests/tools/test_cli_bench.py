"""`hvd-adaptive bench codec`, on few coordinates: how fast it is told is no test's matter."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from hvd_adaptive import ALQ, ECDQ
from hvd_adaptive.tools.bench import codec
from hvd_adaptive.tools.cli import main
from hvd_adaptive.tools.schemes.catalog import scheme_classes

FEW = ["--coordinates", "20000", "--bucket-size", "512", "--rounds", "2"]


def test_it_measures_what_was_asked_for(capsys):
    asked = ["--schemes", "qsgd", "--bits", "3", "8", "--codings", "fixed", "elias"]
    assert main(["bench", "codec", *FEW, *asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["options"]["coordinates"] == 20000
    labels = list(told["results"])
    assert len(labels) == 4 and all("QSGD" in label for label in labels)
    for figures in told["results"].values():
        assert all(
            figures[action] > 0 for action in ("memcpy", "encode", "decode", "sealed", "bare")
        )
    bits = [figures["bits"] for figures in told["results"].values()]
    # Codes of 8 bits, a scale for each bucket and a header; the ones of 3 bits are shorter.
    assert 8 < max(bits) < 8.2 and min(bits) < 3.1


def test_every_scheme_is_measured():
    assert set(codec.NAMES) == set(scheme_classes())


def test_there_is_no_row_that_nobody_asked_for():
    """A name and bits give one row a scheme, of codes of fixed length."""
    asked = codec.Options(schemes=["ALQ", "ECDQ", "EDEN", "DRIVE"], bits=[3], bucket_size=512)
    assert list(codec.cases(asked)) == ["ALQ(bits=3)", "ECDQ(bits=3)", "EDEN(bits=3)", "DRIVE()"]
    coded = codec.cases(replace(asked, codings=("fixed", "elias")))
    assert "ALQ(bits=3, coding='elias')" in coded and len(coded) > 4


@pytest.mark.parametrize("scheme", (ALQ(bits=3), ALQ(bits=3, coding="huffman"), ECDQ(bits=2.0)))
def test_payloads_without_a_checksum_differ_in_nothing_else(scheme):
    flat = torch.linspace(-1, 1, 20_000) ** 3
    scheme.fit(flat)
    sealed = scheme.parts.default.payloads.encode(flat, flat.numel(), 1).bytes
    bare = codec.without_checksum(scheme.parts.default).payloads.encode(flat, flat.numel(), 1).bytes
    assert not bare[12:16].any() and sealed[12:16].any()
    assert torch.equal(sealed[:12], bare[:12]) and torch.equal(sealed[16:], bare[16:])
    assert scheme.settings.tuning.checksum


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--schemes", "ALQQ"], "--schemes: 'ALQQ': must be one of ALQ"),
        (["--bits", "1"], "--bits: "),
        (["--device", "cuda"], "--device cuda: torch sees no GPU here"),
    ],
    ids=["scheme", "bits", "device"],
)
def test_wrong_words(capsys, words, told):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "codec", *FEW, *words])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
