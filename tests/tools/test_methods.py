"""The one syntax of methods, tools/methods.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvd_adaptive
from hvd_adaptive import ScatterReduce
from hvd_adaptive.tools.methods import Method, parse, read

VALUES = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.booleans(),
    st.none(),
    st.lists(st.integers(), max_size=3).map(tuple),
)
KEYWORDS = st.dictionaries(st.sampled_from(["bits", "norm", "clip", "exchange"]), VALUES)


@given(KEYWORDS)
def test_what_is_written_is_read(keywords):
    method = Method("ALQ", keywords)
    assert read(method.label) == [method]


def test_a_scheme_is_constructed_as_it_is_written():
    (method,) = parse(['alq( bits=4,norm = "linf" )'])
    assert repr(method.scheme()) == repr(hvd_adaptive.ALQ(bits=4, norm="linf"))
    assert method.label == "ALQ(bits=4, norm='linf')"
    (bare,) = parse(["SignSGD"])
    assert repr(bare.scheme()) == repr(hvd_adaptive.SignSGD())


def test_stock_methods_are_horovods():
    class Stock:
        none, fp16 = object(), object()

    found = parse(["float32", "float16"])
    assert [method.compression(Stock) for method in found] == [Stock.none, Stock.fp16]
    assert not any(method.is_scheme for method in found)


def test_alternatives_are_all_combinations_each_once():
    found = parse(["ALQ(bits=2|3|4, norm='l2'|'linf')", "ALQ(bits=3, norm='l2')"])
    pairs = [(method.keywords["bits"], method.keywords["norm"]) for method in found]
    assert pairs == [(bits, norm) for bits in (2, 3, 4) for norm in ("l2", "linf")]


def test_settings_objects_are_values_and_their_alternatives_are_combined():
    found = parse(["ALQ(bits=2|3, exchange=ScatterReduce(second_stage_bits=4|8)|'allgather')"])
    pairs = [(method.keywords["bits"], method.keywords["exchange"]) for method in found]
    ways = [ScatterReduce(second_stage_bits=bits) for bits in (4, 8)] + ["allgather"]
    assert pairs == [(bits, way) for bits in (2, 3) for way in ways]
    assert [read(method.label)[0].keywords for method in found] == [m.keywords for m in found]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "as in Python"),
        ("ALQ(bits=3", "as in Python"),
        ("ALQ(3)", "only keywords"),
        ("ALQ(**{'bits': 3})", "only keywords"),
        ("ALQ(bits=bits)", "bits: must be a number"),
        ("ALQ(bits=3)(bits=3)", "must be a name"),
        ("hvd_adaptive.ALQ(bits=3)", "must be a name"),
        ("float16(bits=3)", "takes no keywords"),
        ("ALG()", "must be one of float32, float16, ALQ"),
        ("ALQ(bits=9)", "bits=9"),
        ("ALQ(bit=3)", "'bit'"),
        ("ALQ(bits=3|9)", "bits=9"),
        ("ALQ(exchange=ScatterReduce(bits=3))", "has no keyword 'bits'"),
        ("ALQ(exchange=ScatterReduce(second_stage_bits=1))", "second_stage_bits=1"),
        ("ALQ(exchange=Ring(bits=3))", "must be a number, a quoted string, a tuple, or one of"),
        ("__import__('os')", "only keywords"),
    ],
)
def test_wrong_texts(text, words):
    with pytest.raises(ValueError) as refused:
        parse([text])
    assert words in str(refused.value)
