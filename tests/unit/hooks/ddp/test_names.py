"""Names of parameters for which none were given."""

from __future__ import annotations

import pytest
import torch

from hvd_adaptive.hooks.ddp.names import Names
from hvd_adaptive.settings import Settings

SETTINGS, NAMED = Settings(), Settings(parameter_bits={"a*": None})


def parameters(*sizes):
    return [torch.nn.Parameter(torch.zeros(size)) for size in sizes]


def names_of(names, of, settings=SETTINGS):
    by_id = names.of(of, settings)
    return [by_id[id(parameter)] for parameter in of]


def test_numbers_stay_with_their_parameters():
    """Whichever come later, are left out, or come back."""
    a, b, c, d = parameters(5, 5, 5, 5)
    names = Names([])
    assert names_of(names, [a, b]) == ["0", "1"]
    assert names_of(names, [c, b, a]) == ["2", "1", "0"]
    assert [known[:2] for known in names.saved()] == [("2", 5), ("1", 5), ("0", 5)]
    assert names_of(names, [a, d]) == ["0", "3"]
    assert names_of(names, [b, c]) == ["1", "2"]
    loaded = Names([], [("1", 5), ("2", 5)])  # in another process
    assert names_of(loaded, [a, b]) == ["1", "2"]
    assert names_of(loaded, [c, a, b]) == ["0", "1", "2"]


def test_a_model_that_another_one_has_replaced_does_not_come_back():
    first, second, third = (parameters(4, 3) for _ in range(3))
    names = Names([])
    assert names_of(names, first) == names_of(names, second) == names_of(names, third)
    for former in (first, second):
        with pytest.raises(RuntimeError, match=r"two models in turn.*give each a compressor"):
            names.of(former, SETTINGS)
    assert names_of(names, third) == ["0", "1"]


def test_saved_names_satisfy_patterns():
    saved = [("a.weight", 6), ("b", 2)]
    assert names_of(Names([], saved), parameters(6, 2), NAMED) == ["a.weight", "b"]
    with pytest.raises(ValueError, match=r"unknown, because the loaded .* load the saved"):
        Names([], saved).of(parameters(6, 3), NAMED)
    with pytest.raises(ValueError, match=r"names are unknown: give CompressionState model\.named"):
        Names([]).of(parameters(6, 2), NAMED)


def test_names_that_are_saved_are_recognised_by_values():
    """In any order, also before the first step; by sizes in their order if values are others."""
    own = [torch.nn.Parameter(torch.full((5,), float(value))) for value in range(4)]
    names = Names(list(zip("abcd", own, strict=True)))
    for _ in range(2):
        saved = names.saved()
        assert names_of(Names([], saved), [own[2], own[0], own[1]]) == ["c", "a", "b"]
        assert names_of(Names([], saved), parameters(5, 5, 5, 5)[::-1]) == [n for n, *_ in saved]
        names.of([own[i] for i in (1, 3, 2, 0)], SETTINGS)
    assert [name for name, *_ in saved] == [*"bdca"]
