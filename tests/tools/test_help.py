"""Help of all commands: it fits a terminal of 80 columns and describes every option."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from hvd_adaptive.tools.cli import make_parser


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
