"""`hvd-adaptive bench codec`, on few coordinates: how fast it is told is no test's matter. Tables
of bench in a terminal of 80 columns; help of all commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hvd_adaptive import ALQ, ECDQ
from hvd_adaptive.tools import output
from hvd_adaptive.tools.bench import codec
from hvd_adaptive.tools.bench import command as bench
from hvd_adaptive.tools.bench.codec import Options
from hvd_adaptive.tools.bench.worker import REPORTED
from hvd_adaptive.tools.cli import main, make_parser
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


def test_fractions_of_bits(capsys):
    for scheme, bits in (("ECDQ", 2.5), ("EDEN", 0.5), ("EDEN", 1)):
        asked = ["--schemes", scheme, "--bits", str(bits)]
        assert main(["bench", "codec", *FEW, *asked, "--json"]) == 0
        ((label, figures),) = json.loads(capsys.readouterr().out)["results"].items()
        assert label == f"{scheme}(bits={bits})"
        assert figures["bits"] == pytest.approx(bits, abs=0.15)


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
        (["--bits", "0"], "--bits: '0': must be a number above 0"),
        (["--bits", "1"], "bits=1: must be an integer from 2 to 8"),
        (["--schemes", "EDEN", "--bits", "2.5"], "bits=2.5: must be an integer from 1 to 8, or"),
        (["--device", "cuda"], "--device cuda: torch sees no GPU here"),
    ],
    ids=["scheme", "no bits", "bits", "fraction", "device"],
)
def test_wrong_words(capsys, words, told):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "codec", *FEW, *words])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


LONG = "ALQ(bits=3, norm='linf', exchange=ScatterReduce(second_stage_bits=4))"


def print_exchange() -> None:
    stock = {"method": "float32", "seconds": 1.0071, "quartiles": (1.0012, 1.0123)}
    scheme = {"method": LONG, "seconds": 0.1151, "quartiles": (0.1112, 0.1193)}
    scheme |= dict(zip(REPORTED, (4.383e6, 0.1421, 0.0312, 0.0423, 0.0231), strict=True))
    facts = {"coordinates": 11_689_512, "tensors": 62, "ranks": 4, "hosts": 4, "launcher": "mpi"}
    bench._print_exchange(facts | {"methods": [stock | dict.fromkeys(REPORTED), scheme]})


def print_codec() -> None:
    figures = {"bits": 3.004, "memcpy": 0.004, "encode": 0.006, "decode": 0.005, "sealed": 0.007}
    bench._print_codec({LONG: figures | {"checksum": -1e-5}}, Options(schemes=("ALQ",)))


@pytest.mark.parametrize(
    ("show", "headings"),
    [
        (print_exchange, ["ms", "/ float32", "sent MB", "error"]),
        (print_codec, ["bits", "/ memcpy", "checksum"]),
    ],
)
def test_tables_are_readable(show, headings, monkeypatch, capsys):
    """No line is too long, no cell is cut or squeezed, and rows are short. (The table of `plan` is
    in test_cli_plan.py, that of `schemes` in test_cli_schemes.py.)"""
    monkeypatch.setenv("COLUMNS", "80")
    show()
    lines = capsys.readouterr().out.splitlines()
    framed = [line for line in lines if line[:1] in "┏┃┡│├└"]
    assert framed and max(map(len, framed)) <= 80
    assert "…" not in "".join(framed)
    head = "\n".join(framed)
    for heading in headings:
        assert heading in head, heading
    # The cells of the first column, put together, are the whole label.
    cells = [line[1:].split("│")[0].strip() for line in framed if line.startswith("│")]
    assert LONG.replace(" ", "") in "".join(cells).replace(" ", "")
    assert len(cells) <= 8
    assert all("  " not in cell.strip() for cell in cells)


def test_width_of_what_is_no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output.console().width == output.WIDTH
    monkeypatch.setenv("COLUMNS", "80")
    assert output.console().width == 80
    monkeypatch.setenv("COLUMNS", "wide")
    assert output.console().width == output.WIDTH


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                yield from parsers(own)


@pytest.mark.parametrize("parser", list(parsers(make_parser())), ids=lambda parser: parser.prog)
def test_help_fits_and_describes_every_option(parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = parser.format_help().splitlines()
    assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]
    assert parser.prog == "hvd-adaptive" or parser.description
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action.option_strings
