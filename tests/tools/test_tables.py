"""Tables in a terminal of 80 columns; help of all commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from hvd_adaptive.tools import output
from hvd_adaptive.tools.bench import command as bench
from hvd_adaptive.tools.bench.codec import Options
from hvd_adaptive.tools.bench.worker import REPORTED
from hvd_adaptive.tools.cli import make_parser

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
