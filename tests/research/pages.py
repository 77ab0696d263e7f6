"""What the pages of results that research/ writes have in common."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from script_runs import ROOT, png_size, run


def check_figures(page: str, images: Path, figures: set[str], least: int = 5_000) -> None:
    """Each figure is drawn, of at least ``least`` bytes, and shown."""
    assert {path.stem for path in images.iterdir()} == figures
    for path in images.iterdir():
        assert min(png_size(path)) >= 300
        assert least < path.stat().st_size < 120_000
        assert f"(images/{path.name})" in page


def command_of(paper: str) -> list[str]:
    """The script of a paper, whose page, figures and runs go to the working folder."""
    places = f"--output-dir runs --figures docs/images --page docs/{paper}.md"
    return [sys.executable, str(ROOT / "research" / f"{paper}_paper.py"), *places.split()]


def made(folder: Path, command: list[str], figures: set[str]) -> str:
    """The page that a command writes into a folder, with its figures."""
    run(command, folder, 300)
    (written,) = (folder / "docs").glob("*.md")
    page = written.read_text()
    check_figures(page, folder / "docs/images", figures)
    return page


def verdicts_of(page: str) -> list[tuple[str, str]]:
    """(word, how it was decided) of each claim."""
    return re.findall(r"^- \*\*(Holds|Does not hold|Not decided)\*\* \((\w+)", page, re.M)


def look_up(docs: Path, monkeypatch: pytest.MonkeyPatch, page: str, left_out: str = "?") -> None:
    """Every item of docs/papers.md that this page decides finds its claims on it."""
    import papers
    from papers_list import PAPERS

    monkeypatch.setattr(papers, "DOCS", docs)
    items = [item for of_paper in PAPERS.values() for item in of_paper if item.page == page]
    assert len(items) > 5
    for item in items:
        if left_out not in item.text:
            assert papers.verdicts_on(page, item.claims), item
