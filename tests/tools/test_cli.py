"""What `hvd-adaptive` does if standard output cannot be written, whatever the subcommand."""

from __future__ import annotations

import io
import os
import sys

import pytest

from hvd_adaptive.tools.cli import main
from hvd_adaptive.tools.output import print_table

WORDS = [["schemes"], ["schemes", "ALQ", "--json"], ["doctor", "--help"], ["--version"]]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_full_disk_is_an_error(words, monkeypatch, capsys):
    with open("/dev/full", "w") as full:  # closed without a second error
        monkeypatch.setattr(sys, "stdout", full)
        assert main(words) == 1
    assert capsys.readouterr().err == "error: No space left on device\n"


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_reader_that_has_seen_enough_is_none(words, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(words) == 0
    assert capsys.readouterr().err == ""


def test_no_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["schemes", "ALQ", "--json"]) == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_standard_output_lacks_are_replaced(encoding, monkeypatch, capsys):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert main(["schemes", "ALQ"]) == 0
    assert main(["schemes"]) == 0
    assert b"ALQ" in written.getvalue() and b"?" in written.getvalue()
    assert capsys.readouterr().err == ""


def test_a_table_has_all_its_numbers_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    numbers = [f"{0.218 + k:.3f} (3.12)" for k in range(6)]
    print_table(("method", *"abcdef"), [("ALQ(bits=3)", *numbers), ("QSGD", "-")])
    printed = capsys.readouterr().out
    assert "…" not in printed and "ALQ(bits=3)" in printed
    assert all(number in printed for number in numbers)
