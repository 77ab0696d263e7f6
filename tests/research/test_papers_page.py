"""docs/papers.md: complete, and with the verdicts that the pages of results have today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
import papers  # noqa: E402
import papers_list  # noqa: E402

# Counted in the papers: so many of each kind.
NUMBERED = {
    "ALQ": "10 Theorem, 3 Lemma, 8 Proposition, 4 Corollary, 7 Table, 14 Fig, 1 Algorithm, "
    "1 Definition",
    "NUQSGD": "5 Theorem, 3 Lemma, 1 Corollary, 6 Fig, 1 Algorithm, 1 Definition",
    "QSGD": "1 Table, 3 Fig, 1 Algorithm",
    "ORQ": "1 Theorem, 1 Proposition, 5 Table, 3 Fig, 2 Algorithm, 3 Assumption",
    "QCS": "8 Fig, 1 Algorithm, 4 Remark",
}
NAMED = {
    "QSGD": "Definition 2.1, Theorem 2.1, Corollary 2.2, Lemma 3.1, Theorem 3.2, Corollary 3.3, "
    "Theorem 3.4, Theorem 3.5, Theorem 3.6",
    "ORQ": "Corollary 1.1, Remark 1.1, Remark 1.2",
    "QCS": "Lemma 1, Theorem 2, Lemma 3, Lemma 4, Lemma 5, Lemma 6, Eq. 22, Eq. 23",
}


def statements(paper: str) -> set[tuple[str, int]]:
    """(kind, number) of all names: "Eqs 1, 2, Fig. 2" has three."""
    found = set()
    for item in getattr(papers_list, paper):
        kind = ""
        for word, numbers in re.findall(r"([A-Z][a-z]+)s?\.? (\d[\d a-z,]*)", item.name):
            kind = word.removesuffix("s")
            first, *last = (int(n) for n in re.findall(r"\d+", numbers))
            whole = range(first, last[-1] + 1) if " to " in numbers else (first, *last)
            found |= {(kind, number) for number in whole}
    return found


@pytest.mark.parametrize("paper", NUMBERED)
def test_nothing_is_left_out(paper):
    kinds = [item.split() for item in NUMBERED[paper].split(", ")]
    wanted = {(kind, number) for count, kind in kinds for number in range(1, int(count) + 1)}
    assert wanted <= statements(paper)


@pytest.mark.parametrize("paper", NAMED)
def test_what_has_a_number_of_its_section(paper):
    names = [item.name for item in getattr(papers_list, paper)]
    for wanted in NAMED[paper].split(", "):
        assert any(re.search(rf"{re.escape(wanted)}(?!\d|\.\d)", name) for name in names), wanted


def test_the_page_is_of_today():
    assert (ROOT / "docs/papers.md").read_text(encoding="utf-8") == papers.page()


def test_each_item_is_one_of_three():
    for items in papers_list.PAPERS.values():
        for item in items:
            assert [bool(item.test), bool(item.page), bool(item.reason)].count(True) == 1, item
            assert not item.test or (ROOT / "tests/unit" / item.test).is_file(), item
            assert not item.page or (item.page in papers.COMMANDS and item.claims), item


def test_verdicts_are_looked_up(tmp_path, monkeypatch):
    (tmp_path / "orq.md").write_text(
        "- **Holds** (p = 0.01): A is more accurate than B. By 1.\n"
        "- **Not decided** (p = 1): A is more accurate than C. A is more accurate than B.\n"
        "- **Does not hold** (computed): bytes are fewer. 2.\n"
        "- **Holds**: A is more accurate than D, by no rule.\n"
    )
    monkeypatch.setattr(papers, "DOCS", tmp_path)
    assert papers.verdicts_on("orq.md", ["A is more"]) == ["holds", "not decided"]
    assert papers.verdicts_on("orq.md", ["than B$", "^bytes"]) == ["holds", "does not hold"]
    item = papers_list.Item("Fig. 1", "text", page="orq.md", claims=("A is more", "bytes"))
    assert papers._found(item) == "holds: 1, does not hold: 1, not decided: 1"
    alone = papers_list.Item("Fig. 1", "text", page="orq.md", claims=("nothing",))
    assert papers._found(alone).startswith("not decided")
