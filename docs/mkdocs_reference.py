"""Hooks of mkdocs: docs/reference.md gets the signatures and docstrings that it names.

<!-- help: NAME --> becomes a heading and what help() tells of NAME. Pages get a link to the
repository if setup.py has its address.
"""

from __future__ import annotations

import inspect
import pydoc
import re
from pathlib import Path
from typing import Any

ASKED = re.compile(r"^<!-- help: ([\w.]+) -->$", re.MULTILINE)
# Of longer signatures each parameter has a line.
WIDTH = 100


def on_config(config: Any) -> Any:
    """Called by mkdocs at the start."""
    setup = (Path(__file__).parents[1] / "setup.py").read_text(encoding="utf-8")
    config.repo_url = address(setup) or None
    return config


def address(setup: str) -> str:
    """The repository's address in the text of setup.py; "" while it is unknown."""
    (found,) = re.findall(r'^REPOSITORY = "(.*)"$', setup, re.MULTILINE)
    return found


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return ASKED.sub(lambda match: described(match[1]), markdown)


def described(name: str) -> str:
    """Signature and docstring as they are in the code; ValueError where NAME has none."""
    thing = pydoc.locate(name)
    text = inspect.getdoc(thing)
    if thing is None or not text:
        raise ValueError(f"reference: {name} does not exist or has no docstring")
    short = name.rpartition(".")[2]
    return f"### `{short}`\n\n```text\n{signature(short, thing)}\n\n{text}\n```"


def signature(name: str, thing: Any) -> str:
    """As it is called; annotations are left out, since the text says the same in words."""
    is_error = isinstance(thing, type) and issubclass(thing, Exception)
    if isinstance(thing, property) or inspect.ismodule(thing) or is_error:
        return name
    found = inspect.signature(thing)
    given = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "self"]
    line = f"{name}{found.replace(parameters=given, return_annotation=found.empty)}"
    if len(line) <= WIDTH:
        return line
    listed = "".join(f"    {parameter},\n" for parameter in given)
    return f"{name}(\n{listed})"
