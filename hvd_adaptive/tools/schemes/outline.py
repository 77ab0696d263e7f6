"""Read documentation from source files, because importing torch takes seconds."""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import hvd_adaptive

PACKAGE = Path(__file__).parents[2]
# What ends with a dot and no sentence: "Eq. 4", "et al. 2017".
SENTENCE = re.compile(r"(?<!\bEq)(?<!\bEqs)(?<!\bApp)(?<!\bal)[.](?:\s|$)")


@dataclass(frozen=True)
class Outline:
    """Hold what a scheme's source says.

    Attributes:
        name: Name of the class.
        method: First sentence of its documentation, including the paper.
        keywords: The scheme's own keywords with their defaults ("" if there is none).
        documentation: Docstring of the class.
    """

    name: str
    method: str
    keywords: dict[str, str]
    documentation: str

    @property
    def signature(self) -> str:
        """Return the call with all of the scheme's own keywords."""
        own = (f"{key}={value}" if value else key for key, value in self.keywords.items())
        return f"{self.name}({', '.join(own)})"


@functools.cache
def outlines() -> list[Outline]:
    """Return all schemes that hvd_adaptive exports, in the order of ``__all__``."""
    nodes = itertools.chain.from_iterable(map(_classes, (PACKAGE / "schemes").glob("*.py")))
    found = {node.name: node for node in nodes}
    return [_outline(found[name]) for name in hvd_adaptive.__all__ if name in found]


def outline(text: str) -> Outline:
    """Parse a scheme's name, which may be written in small letters."""
    for one in outlines():
        if one.name.lower() == text.lower():
            return one
    names = ", ".join(one.name for one in outlines())
    raise argparse.ArgumentTypeError(f"{text!r}: must be one of {names}")


def shared_keywords() -> str:
    """Return the documentation of the keywords that every scheme shares."""
    (settings,) = (n for n in _classes(PACKAGE / "settings.py") if n.name == "Settings")
    return (ast.get_docstring(settings) or "").partition("\n\n")[2]


def _classes(file: Path) -> list[ast.ClassDef]:
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return [node for node in nodes if isinstance(node, ast.ClassDef)]


def _outline(node: ast.ClassDef) -> Outline:
    constructors = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
    keywords = {}
    for constructor in constructors:
        arguments = constructor.args
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            keywords[argument.arg] = "" if default is None else ast.unparse(default)
    documentation = ast.get_docstring(node) or ""
    method = SENTENCE.split(documentation.partition("\n\n")[0].replace("\n", " "))[0]
    return Outline(node.name, method, keywords, documentation)
