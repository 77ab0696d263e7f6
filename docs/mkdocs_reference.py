"""Hook of mkdocs: a page for each class and function that the tables of reference.md name.

A row is ``| `path` | what it is | `method` ... |``. In the built pages its first cell is a link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

INDEX = "reference.md"
ROW = re.compile(r"^\| `(hvd_adaptive[\w.]*)` \|[^|]*\|(.*)$", re.MULTILINE)


def listed() -> dict[str, list[str]]:
    """Return the methods of each class and function that reference.md names."""
    text = (Path(__file__).parent / INDEX).read_text(encoding="utf-8")
    return {path: re.findall(r"`(\w+)`", methods) for path, methods in ROW.findall(text)}


def page_of(path: str) -> str:
    """Return the page of a class or function."""
    return f"reference/{path.rpartition('.')[2]}.md"


def text_of(path: str, methods: list[str]) -> str:
    """Return the Markdown of a page."""
    blocks = [f"::: {path}\n    options:\n      heading_level: 1\n"]
    blocks += [f"::: {path}.{name}\n    options:\n      heading_level: 2\n" for name in methods]
    return "\n".join(blocks)


def on_config(config: Any) -> Any:
    """Add the pages to the menu."""
    pages = [{path.rpartition(".")[2]: page_of(path)} for path in listed()]
    entry = {"Reference": [{"Overview": INDEX}, *pages]}
    for section in config.nav:
        for entries in section.values():
            if isinstance(entries, list) and {"Reference": INDEX} in entries:
                entries[entries.index({"Reference": INDEX})] = entry
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for path, methods in listed().items():
        files.append(File.generated(config, page_of(path), content=text_of(path, methods)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link the names in reference.md to their pages, and other pages to methods on them."""
    if page.file.src_uri == INDEX:
        return ROW.sub(lambda row: row[0].replace(f"`{row[1]}`", linked(row[1]), 1), markdown)
    known = "|".join(map(re.escape, sorted(listed(), key=len, reverse=True)))
    anchor = re.compile(rf"\]\({re.escape(INDEX)}#((?:{known})[\w.]*)\)")
    return anchor.sub(lambda link: f"]({page_of(holder(link[1]))}#{link[1]})", markdown)


def linked(path: str) -> str:
    """Return a link to the page of a class or function."""
    return f"[`{path.rpartition('.')[2]}`]({page_of(path)})"


def holder(path: str) -> str:
    """Return the class or function whose page describes a method."""
    known = listed()
    return path if path in known else path.rpartition(".")[0]
