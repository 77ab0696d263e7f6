"""What is zero on every rank is zero after the exchange, through both of its stages."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from scheme_cases import CASES, EVERY, has_level_zero, scheme
from simulated_steps import take_step

from hvd_adaptive import Hierarchical, ScatterReduce, instances
from hvd_adaptive.simulate import Ranks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "choosing.md"
EXCHANGES = {
    "allgather": {"exchange": "allgather"},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=4)},
    # Three nodes: their means travel by scatter_reduce.
    "hierarchical": {"exchange": Hierarchical(ranks_per_node=2, second_stage_bits=4)},
}
RANKS, ROWS, WIDTH = 6, 800, 8
# With each kind of table and coder.
MORE = (
    "alq-3-huffman",
    "alq-3-paper",
    "bingrad-biased",
    "ecdq-variance0.01",
    "eden-0.5",
    "nuqsgd-4-huffman",
    "orq-9-half-clip2.5",
    "qcs-mmse",
    "qsgd-3-elias",
    "qsgd-3-symmetric",
    "terngrad-clip2.5",
)


def made(name: str, **keywords):
    instances.start_over()
    own = {"bucket_size": 1024, "keep_zeros": True}
    return scheme(name)(**own | keywords)


def zero_rows(pattern: str) -> torch.Tensor:
    """Rows that are zero on all ranks."""
    rows = torch.zeros(ROWS, dtype=torch.bool)
    if pattern == "few rows":
        rows[370:378] = True
    else:
        rows[torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[: ROWS // 2]] = True
    return rows


def gradient(rank: int, step: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows of different sizes; some that are zero on this rank alone."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = torch.randn(ROWS, 1, generator=generator).exp()
    values = torch.randn(ROWS, WIDTH, generator=generator) * sizes
    values[torch.rand(ROWS, generator=generator) < 0.1] = 0.0
    values[rows] = torch.tensor([0.0, -0.0]).repeat(WIDTH // 2)
    return values


def averages(compressor, rows: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    """Of a table, and of a partial bucket behind it."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((ROWS, WIDTH), (1500,))]
    rest = torch.linspace(-1, 1, 1500)
    rest[1400:] = 0.0
    ranks, found = Ranks(zip(("table", "rest"), parameters, strict=True), compressor, RANKS), []
    for step in range(steps):
        gradients = [(gradient(rank, step, rows), rest.clone()) for rank in range(RANKS)]
        table, of_rest = take_step(ranks, step, parameters, gradients)
        assert not of_rest[1400:].any() or not compressor.settings.keep_zeros
        found.append(table)
    return found


@pytest.mark.many
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("pattern", "keep"), [("few rows", True), ("half of the rows", True), ("few rows", False)]
)
@pytest.mark.parametrize("name", (*EVERY, *MORE))
def test_rows_of_zeros_stay_zero(name, pattern, keep, exchange):
    """Without the keyword, those of schemes with a level 0."""
    rows = zero_rows(pattern)
    found = averages(made(name, keep_zeros=keep, **EXCHANGES[exchange]), rows)
    if keep or has_level_zero(name):
        assert not any(average[rows].any() for average in found)
    elif name not in ("quantile-5", "orq-9-half-clip2.5"):  # a level may happen to be 0
        assert any(average[rows].any() for average in found)
    for average in found:
        assert average[~rows].any(dim=1).float().mean() > 0.5


@pytest.mark.many
@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
@pytest.mark.parametrize("name", EVERY)
def test_with_error_feedback_and_tables_of_tensors(name, exchange):
    rows = zero_rows("half of the rows")
    compressor = made(name, error_feedback=0.2, **EXCHANGES[exchange])
    assert not any(average[rows].any() for average in averages(compressor, rows, 3))
    if name.startswith(("alq", "qsgd", "ecdq")):
        compressor = made(
            name, scope="tensor", tail="full", parameter_bits={"table": 4}, **EXCHANGES[exchange]
        )
        assert not any(average[rows].any() for average in averages(compressor, rows, 1))


def test_the_page_says_which_schemes_keep_zeros():
    """Always: the defaults of the class have a level 0. With the keyword: keep_zeros=True."""
    told = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 5:
            for name in re.findall(r"`(\w+)\(", cells[0]):
                told.setdefault(name, set()).add(cells[3])
    for name in EVERY:
        case = CASES[name]
        make = case.func if isinstance(case, partial) else case
        needed = {"density": 0.2} if name.startswith("sparse") else {}
        needed = {"bits": 3} if name.startswith("ecdq") else needed
        compressor = make(**needed)
        kept = "always" if compressor.parts.default.has_zero else "with the keyword"
        assert told[type(compressor).__name__] == {kept}
