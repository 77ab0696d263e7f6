"""Extension of griffe: docstrings are plain text, in which 2**bits is a power and docs/NAME.md a
page. Shared keywords get the types that ``Settings`` and ``Shared`` declare."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe


class PlainText(griffe.Extension):
    """Escape the asterisks that Markdown would read as emphasis."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            if obj.path == "hvd_adaptive.settings.Settings":
                obj.docstring.value = typed(obj.docstring.value)
            obj.docstring.value = linked(escaped(obj.docstring.value))


def linked(text: str) -> str:
    """Return the text with links to the pages, and to the shared keywords, that it names."""
    settings = "hvd_adaptive.settings.Settings"
    text = text.replace(f"``{settings}``", f"[`Settings`][{settings}]")
    return re.sub(r"\bdocs/(\w+)\.md\b", lambda m: f"[{title(m[1])}](../{m[1]}.md)", text)


def title(page: str) -> str:
    """Return a page's heading."""
    text = (Path(__file__).parent / f"{page}.md").read_text(encoding="utf-8")
    return text.split("\n", 1)[0].removeprefix("# ").split(":")[0]


def typed(text: str) -> str:
    """Return the docstring of Settings with the types of its attributes, as Google's style has
    them: ``name (type): description``.
    """
    known = types_of_keywords()
    names = "|".join(known)
    return re.sub(rf"^    ({names}):", lambda m: f"    {m[1]} ({known[m[1]]}):", text, flags=re.M)


def types_of_keywords() -> dict[str, str]:
    """Return the declared type of each shared keyword."""
    path = Path(__file__).resolve().parents[1] / "hvd_adaptive" / "settings.py"
    return {
        str(ast.unparse(field.target)): ast.unparse(field.annotation)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    }


def escaped(text: str) -> str:
    """Return the text with asterisks after a word escaped, outside of code."""
    code = re.compile(r"(``.*?``|`[^`]*`)", re.DOTALL)
    parts = code.split(text)
    parts[::2] = [re.sub(r"(?<=\w)\*+", lambda m: r"\*" * len(m[0]), part) for part in parts[::2]]
    return "".join(parts)
