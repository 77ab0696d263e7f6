"""README.md and docs/choosing.md quote the results pages: what they say is found there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
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


def test_the_readmes_three_numbers():
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    told = {row[0].strip("*"): row[1] for row in lines(readme)[1:]}
    head, *rows = lines(after("performance.md", "## In a backward pass"))
    both = len(head) - 1 - head[::-1].index("both")  # of 4 hosts
    steps = {row[0]: row[both] for row in rows}
    methods = (
        '`ALQ(bits=3, norm="l2", symmetric=True)`',
        "DDP, Gloo, fp16 hook",
        "DDP, Gloo, float32",
        "Horovod, MPI, float32",
    )
    assert re.findall(r"(\d\.\d+) s\b", told["step time"])[:4] == [steps[m] for m in methods]
    head, *rows = lines(after("performance.md", "## `make demo`"))
    (ratio,) = [row[head.index("float32 / payload")] for row in rows if row[0] == "`ALQ(bits=3)`"]
    assert told["bytes"].startswith(f"{ratio} times less than float32")
    head, *rows = lines(after("results.md", "### LeNet-5"))
    (alq,) = [row for row in rows if row[0] == "ALQ"]
    deficit = alq[head.index("deficit to SuperSGD, points")].removeprefix("+")
    interval = alq[head.index("95% interval")]
    expected = f"{deficit} percentage points below float32, 95 % interval {interval}:"
    assert told["accuracy"].startswith(expected)
