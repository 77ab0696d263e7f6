"""README.md and docs/choosing.md quote the results pages: what they say is found there. Every line
of docs/compatibility.md names tests, which exist."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest

from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.hooks.ddp.bucket_session import UNUSED

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Where a table of choosing.md comes from: its section, then page and heading or opening.
SOURCES = {
    "Error at equal bits": ("rate.md", "Step 200, unbiased schemes"),
    "Accuracy": ("results.md", "### LeNet-5"),
    "At equal bits": ("results.md", "### At equal bits: LeNet-5"),
}


def lines(text: str) -> list[list[str]]:
    """Cells of a text's first table, without its head's rule."""
    found = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert found, text[:200]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()]
    return [rows[0], *rows[2:]]


def after(page: str, opening: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text.count(f"\n{opening}") == 1, (page, opening)
    return text.split(f"\n{opening}", 1)[1]


@pytest.mark.parametrize("section", SOURCES)
def test_lines_are_those_of_the_results(section):
    quoted = after("choosing.md", section if section == "At equal bits" else f"## {section}")
    head, *rows = lines(quoted)
    source_head, *source = lines(after(*SOURCES[section]))
    name = source_head.index(head[0])
    columns = [source_head.index(column) for column in head]
    known = {row[name]: row for row in source}
    assert len(rows) > 5
    for row in rows:
        assert row == [known[row[0]][column] for column in columns]


def test_what_the_text_says_of_them():
    _, *rows = lines(after("rate.md", "Step 200, unbiased schemes"))
    error = {row[0]: [float(cell) if cell else None for cell in row[1:]] for row in rows}
    told = re.search(
        r"a (\d+)th of L2-normalised QSGD's at 3 bits",
        after("choosing.md", "## Error at equal bits"),
    )
    assert round(error["QSGD"][2] / error["ALQ"][2]) == int(told[1])
    for column in range(6):
        others = [values[column] for name, values in error.items() if name != "ECDQ"]
        assert error["ECDQ"][column] < min(value for value in others if value is not None)
    coded, packed = error["ALQ L∞ with zero, Huffman"], error["ALQ L∞ with zero"]
    assert all(coded[column] < packed[column + 1] for column in (1, 2))  # one bit less


def readme() -> list[list[str]]:
    """Rows of the first table of README.md; a subject stands in the first of its rows."""
    _, *rows = lines((ROOT / "README.md").read_text(encoding="utf-8"))
    return rows


def tables(page: str, heading: str) -> list[list[list[str]]]:
    section = after(page, heading).split("\n## ", 1)[0]
    return [lines(found) for found in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)]


def column(table: list[list[str]], heading: str) -> dict[str, str]:
    place = table[0].index(heading)
    return {row[0].replace("Gloo, ", ""): row[place] for row in table[1:]}


def test_the_readmes_numbers():
    told = readme()
    steps = column(tables("performance.md", "## In a backward pass")[0], "both")
    assert len(told[:3]) == 3
    for _, method, seconds in told[:3]:
        assert seconds == f"{steps[method]} s", method
    sharded = column(tables("fsdp.md", "## Measured")[0], "2 hosts, 100 Mbit/s")
    for _, method, seconds in told[3:5]:
        assert seconds == f"{sharded[method].split(', ')[1]} s", method
    found = tables("performance.md", "## Time to accuracy")
    of_tasks = [t for t in found if t[0][0] == "100 Mbit/s"]
    assert len(of_tasks) == 2
    for rows, table in zip((told[5:8], told[8:11]), of_tasks, strict=True):
        seconds = column(table, "seconds to target")
        for _, method, value in rows:
            known = seconds[method.removeprefix("Horovod, ")]
            assert value == (known if known == "never" else f"{known} s"), method
    (demo,) = tables("performance.md", "## `make demo`")[:1]
    payloads, wire = column(demo, "payload bytes a step"), column(demo, "wire bytes a step")
    for (_, method, value), name in zip(
        told[11:14], ("Horovod float32", "Horovod fp16", "`ALQ(bits=3)`"), strict=True
    ):
        assert name.removeprefix("Horovod ") == method.removeprefix("Horovod, ")
        assert value == wire[name]
    keys = (ROOT / "README.md").read_text(encoding="utf-8").split("Look at three keys", 1)[1]
    shown = [row[1] for row in lines(keys)[1:]]
    assert shown == [payloads["Horovod float32"], payloads["`ALQ(bits=3)`"], wire["`ALQ(bits=3)`"]]
    head, *rows = lines(after("results.md", "### LeNet-5"))
    (alq,) = [row for row in rows if row[0] == "ALQ"]
    deficit = -float(alq[head.index("deficit to SuperSGD, points")])
    least, most = (-float(end) for end in alq[head.index("95% interval")].split(" to "))
    assert told[14][2] == f"{deficit:+.2f} points ({most:+.2f} to {least:+.2f})"
    assert len(told) == 15


def test_the_readmes_warnings():
    """Are those that are printed."""
    told = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    quoted = re.findall(r'"([^"]+)"', told[told.index("If the hook was not registered") :])[:2]
    sources = [UNUSED, inspect.getsource(GradientCompressor.report)]
    for words, source in zip(quoted, sources, strict=True):
        assert words in " ".join(re.sub(r'"\s+"', "", source).split())


def test_the_home_pages_number():
    steps = column(tables("performance.md", "## In a backward pass")[0], "both")
    home = " ".join((DOCS / "index.md").read_text(encoding="utf-8").split())
    alq, fp16 = steps["DDP, `ALQ(bits=3)`"], steps["DDP, fp16 hook"]
    assert f"{alq} s with DDP and `ALQ(bits=3)`, and {fp16} s with DDP's fp16 hook" in home


PAGE = DOCS / "compatibility.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(\[[^`]*\])?`")


def rows() -> list[list[str]]:
    """Cells of the tables' lines, without heads."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] not in ("What", "---")]


@functools.cache
def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_named_tests_exist(row):
    _, result, shown = row
    assert re.match(r"works|refused|error|documented|limits", result), result
    found = TEST.findall(shown)
    assert found, "no test is named"
    assert len(found) == shown.count("::"), "a test's name is not understood"
    for file, name, case in found:
        assert name.startswith("test_") and name in functions(ROOT / file), (file, name)
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(word in text for word in re.findall(r"\w+", case)), (name, case)


def test_tests_that_other_pages_name_exist():
    for page in (ROOT / "docs").glob("*.md"):
        for file, name, _ in TEST.findall(page.read_text(encoding="utf-8")):
            assert name in functions(ROOT / file), (page.name, file, name)


def test_the_page_has_a_line_for_everything():
    assert len(rows()) >= 50
