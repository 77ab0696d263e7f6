"""Writes docs/papers.md: every numbered statement of the five papers, and what became of it here.

    python research/papers.py [--page docs/papers.md]

Verdicts on training are those of the pages of results, which are looked up: run this after one of
these pages was made again. The list itself is papers_list.py.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from papers_list import PAPERS, Item

DOCS = Path(__file__).resolve().parents[1] / "docs"
COMMANDS = {
    "results.md": "`python research/compare.py --results docs/results.md --jobs 2`",
    "orq.md": "`python research/orq_paper.py`",
    "qcs.md": "`python research/qcs_paper.py`",
}
TITLES = {"results.md": "results", "orq.md": "ORQ", "qcs.md": "QCS"}
WORDS = ("holds", "does not hold", "not decided")
CLAIM = re.compile(r"^- \*\*(Holds|Does not hold|Not decided)\*\* \([^)]*\): (.*)$", re.MULTILINE)
HEAD = """# The papers, statement by statement

Made by `python research/papers.py`. Every numbered table, figure, theorem, lemma, proposition,
corollary, remark and algorithm of the five papers, and what their text claims of experiments: where
it is in this repository, whether it holds here, and the command that shows it.

- *holds*: a test or a page shows it. *mended*: it is wrong in print, and holds as corrected
  ([what is wrong](theory.md#slips-in-the-papers)).
- Verdicts on training are those of a page's claims, by the one rule that each page states;
  "holds: 2, not decided: 1" counts claims of different tasks or methods. They are about small
  networks on small images.
- *not tried*: with the reason.
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=DOCS / "papers.md")
    args = parser.parse_args()
    args.page.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page's Markdown."""
    parts = [HEAD]
    for title, items in PAPERS.items():
        rows = [_row(item) for item in items]
        table = [
            "| | what it says | here | verdict | command, or why not |",
            "| --- | --- | --- | --- | --- |",
            *rows,
        ]
        parts.append(f"## {title}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def _row(item: Item) -> str:
    if item.reason:
        return f"| {item.name} | {item.text} | - | not tried | {item.reason} |"
    if item.page:
        where = f"[{TITLES[item.page]}]({item.page})"
        return f"| {item.name} | {item.text} | {where} | {_found(item)} | {COMMANDS[item.page]} |"
    path = f"tests/unit/{item.test}"
    command = item.command or "`pytest` that file"
    return f"| {item.name} | {item.text} | `{path}` | {item.verdict} | {command} |"


def _found(item: Item) -> str:
    """How many of the page's claims have which verdict."""
    words = verdicts_on(item.page, item.claims)
    if not words:
        return "not decided: the page is to be made again"
    counts = Counter(words)
    if len(words) == 1:
        return words[0]
    return ", ".join(f"{word}: {counts[word]}" for word in WORDS if counts[word])


def verdicts_on(name: str, claims: Sequence[str]) -> list[str]:
    """Of the claims on a page whose text, before its figures, has a match of one of ``claims``."""
    text = (DOCS / name).read_text(encoding="utf-8")
    return [
        word.lower()
        for word, claim in CLAIM.findall(text)
        if any(re.search(each, claim.split(". ")[0]) for each in claims)
    ]


if __name__ == "__main__":
    main()
