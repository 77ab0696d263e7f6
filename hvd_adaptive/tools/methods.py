"""Read methods of exchanging gradients, written as in Python.

float32  float16                     stock Horovod, Compression.none and Compression.fp16
ALQ(bits=3, exchange='auto')         a scheme of hvd_adaptive with its keywords
ALQ(bits=2|3, coding='fixed'|'elias')    every combination of the values that | separates
ALQ(exchange=ScatterReduce(second_stage_bits=4|8))    the same of hvd_adaptive's settings objects
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.options import KINDS
from hvd_adaptive.tools.schemes.catalog import scheme_classes

# The names of Horovod's own methods in hvd.Compression.
STOCK = {"float32": "none", "float16": "fp16"}


@dataclass(frozen=True)
class Method:
    """Hold a method's name and keywords."""

    name: str
    keywords: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Return the method as a text that ``read`` reads."""
        given = ", ".join(f"{keyword}={value!r}" for keyword, value in self.keywords.items())
        return f"{self.name}({given})" if self.is_scheme else self.name

    @property
    def is_scheme(self) -> bool:
        """Return whether it is a scheme instead of stock Horovod's method."""
        return self.name not in STOCK

    def having(self, **keywords: Any) -> Method:
        """Return the same method with more keywords, or other values of those that it has."""
        return Method(self.name, {**self.keywords, **keywords})

    def scheme(self) -> Any:
        """Construct the compressor.

        Raises:
            ValueError: there is no such scheme, or it refuses the keywords.
        """
        known = scheme_classes()
        if self.name not in known:
            names = ", ".join([*STOCK, *known])
            raise ValueError(f"{self.label!r}: must be one of {names}, with keywords")
        try:
            return known[self.name](**self.keywords)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(f"{self.label!r}: {error}") from error

    def compression(self, stock: Any) -> Any:
        """Return what hvd.DistributedOptimizer takes; ``stock`` is hvd.Compression."""
        return self.scheme() if self.is_scheme else getattr(stock, STOCK[self.name])


def parse(texts: Iterable[str]) -> list[Method]:
    """Return the methods of all texts, each once.

    Raises:
        ValueError: a text is no method, or a scheme refuses its keywords.
    """
    methods = {method.label: method for text in texts for method in read(text)}
    for method in methods.values():
        if method.is_scheme:
            method.scheme()
    return list(methods.values())


def read(text: str) -> list[Method]:
    """Return the methods that a text describes, without constructing them.

    Names of schemes may be written in small letters.

    Raises:
        ValueError: the text is not "name" or "name(keyword=value, ...)".
    """
    text = text.strip()
    try:
        call = ast.parse(text, mode="eval").body
        node = call.func if isinstance(call, ast.Call) else call
        if not isinstance(node, ast.Name):
            raise ValueError("must be a name, with keywords in parentheses: ALQ(bits=3)")
        choices = _choices(call) if isinstance(call, ast.Call) else []
    except SyntaxError as error:
        how = "must be written as in Python, such as ALQ(bits=3)"
        raise ValueError(f"{text!r}: {how}: {error.msg}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}") from error
    names = {name.lower(): name for name in [*STOCK, *scheme_classes()]}
    name = names.get(node.id.lower(), node.id)
    if name in STOCK and isinstance(call, ast.Call):
        raise ValueError(f"{text!r}: takes no keywords")
    return [Method(name, dict(pairs)) for pairs in itertools.product(*choices)]


def _choices(call: ast.Call) -> list[list[tuple[str, Any]]]:
    """Return (keyword, value) for each of a keyword's alternatives, for each keyword."""
    if call.args or any(word.arg is None for word in call.keywords):
        raise ValueError("only keywords are allowed, such as bits=3")
    return [
        [(str(word.arg), v) for node in _alternatives(word.value) for v in _values(node)]
        for word in call.keywords
    ]


def _values(node: ast.expr) -> list[Any]:
    """Return the value of a literal, or each settings object that a call describes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
        kind = KINDS[node.func.id]
        return [kind(**dict(pairs)) for pairs in itertools.product(*_choices(node))]
    try:
        return [ast.literal_eval(node)]
    except ValueError:
        value = ast.unparse(node)
        raise ValueError(
            f"{value}: must be a number, a quoted string, a tuple, or one of {', '.join(KINDS)} "
            "with keywords"
        ) from None


def _alternatives(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    return [node]
