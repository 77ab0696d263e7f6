"""Tables in a terminal of 80 columns; help of all commands."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

import pytest
from plan_machines import FREE, machine

from hvd_adaptive.tools import output
from hvd_adaptive.tools.bench import command as bench
from hvd_adaptive.tools.bench.codec import Options
from hvd_adaptive.tools.bench.worker import REPORTED
from hvd_adaptive.tools.cli import make_parser
from hvd_adaptive.tools.plan.model import Job, advise, predict, show
from hvd_adaptive.tools.schemes import command as schemes

LONG = "ALQ(bits=3, norm='linf', exchange=ScatterReduce(second_stage_bits=4))"
SHORT = "QSGD(bits=4, norm='linf')"


def print_plan() -> None:
    codec = dataclasses.replace(FREE, label=SHORT, encode_s=1e-9, decode_s=1e-9)
    job, own = Job(161, 340_000_000, 16, 1.25e9, compute_s=0.12), machine(codec)
    predictions = predict(job, own)
    show(predictions, advise(predictions)[0])


def print_exchange() -> None:
    stock = {"method": "float32", "seconds": 1.0071, "quartiles": (1.0012, 1.0123)}
    scheme = {"method": LONG, "seconds": 0.1151, "quartiles": (0.1112, 0.1193)}
    scheme |= dict(zip(REPORTED, (4.383e6, 0.1421, 0.0312, 0.0423, 0.0231), strict=True))
    facts = {"coordinates": 11_689_512, "tensors": 62, "ranks": 4, "hosts": 4, "launcher": "mpi"}
    bench._print_exchange(facts | {"methods": [stock | dict.fromkeys(REPORTED), scheme]})


def print_codec() -> None:
    figures = {"bits": 3.004, "memcpy": 0.004, "encode": 0.006, "decode": 0.005, "sealed": 0.007}
    bench._print_codec({LONG: figures | {"checksum": -1e-5}}, Options(schemes=("ALQ",)))


def print_schemes() -> None:
    entry = {"call": "NaturalCompression()", "bits": 9.0, "bound": 0.125, "unbiased": True}
    entry |= {"relative_error": 0.08193, "laplacian_error": 0.08151}
    schemes._print_measured([entry, entry])


TABLES = {
    "plan": (print_plan, SHORT, ["exchange", "step", "MB", "error"]),
    "exchange": (print_exchange, LONG, ["ms", "/ float32", "sent MB", "error"]),
    "codec": (print_codec, LONG, ["bits", "/ memcpy", "checksum"]),
    "schemes": (print_schemes, "NaturalCompression()", ["bits", "error", "bound", "unbiased"]),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_readable(name, monkeypatch, capsys):
    """No line is too long, no cell is cut or squeezed, and rows are short."""
    show, label, headings = TABLES[name]
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
    assert label.replace(" ", "") in "".join(cells).replace(" ", "")
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
    """A parser and those of its subcommands."""
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
