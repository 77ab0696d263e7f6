"""Read what schemes say of themselves from their source, since importing torch takes a second."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from importlib import resources

import hvd_adaptive

# What ends with a dot and no sentence: "Eq. 4", "et al. 2017".
SENTENCE = re.compile(r"(?<!\bEq)(?<!\bEqs)(?<!\bApp)(?<!\bal)[.](?:\s|$)")


@dataclass(frozen=True)
class Outline:
    """A scheme.

    Attributes:
        name: Name of the class.
        method: First sentence of its documentation, including the paper.
        keywords: The scheme's own keywords with their defaults ("" if there is none).
    """

    name: str
    method: str
    keywords: dict[str, str]

    @property
    def signature(self) -> str:
        """Return the call with all of the scheme's own keywords."""
        own = (f"{key}={value}" if value else key for key, value in self.keywords.items())
        return f"{self.name}({', '.join(own)})"


def outlines() -> list[Outline]:
    """Return all schemes that hvd_adaptive exports, in the order of ``__all__``."""
    found = {}
    for file in (resources.files("hvd_adaptive") / "schemes").iterdir():
        if file.name.endswith(".py"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name in hvd_adaptive.__all__:
                    found[node.name] = _outline(node)
    return [found[name] for name in hvd_adaptive.__all__ if name in found]


def first_sentence(documentation: str) -> str:
    """Return the first sentence of a docstring."""
    return SENTENCE.split(inspect.cleandoc(documentation).split("\n\n")[0].replace("\n", " "))[0]


def _outline(node: ast.ClassDef) -> Outline:
    constructors = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
    keywords = {}
    for constructor in constructors:
        arguments = constructor.args
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            keywords[argument.arg] = "" if default is None else ast.unparse(default)
    return Outline(node.name, first_sentence(ast.get_docstring(node) or ""), keywords)
