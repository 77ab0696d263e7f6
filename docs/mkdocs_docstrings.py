"""Extension of griffe: docstrings are plain text, in which 2**bits is a power."""

from __future__ import annotations

import re
from typing import Any

import griffe


class PlainText(griffe.Extension):
    """Escape the asterisks that Markdown would read as emphasis."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = escaped(obj.docstring.value)


def escaped(text: str) -> str:
    """Return the text with asterisks after a word escaped, outside of code."""
    code = re.compile(r"(``.*?``|`[^`]*`)", re.DOTALL)
    parts = code.split(text)
    parts[::2] = [re.sub(r"(?<=\w)\*+", lambda m: r"\*" * len(m[0]), part) for part in parts[::2]]
    return "".join(parts)
