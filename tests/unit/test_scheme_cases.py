"""The cases that tests run over: every scheme is among them, and no two are the same."""

from __future__ import annotations

from scheme_cases import CASES, EVERY, scheme, schemes

import hvd_adaptive
from hvd_adaptive.compressor import GradientCompressor


def exported() -> set[type]:
    public = [getattr(hvd_adaptive, name) for name in hvd_adaptive.__all__]
    classes = [thing for thing in public if isinstance(thing, type)]
    return {thing for thing in classes if issubclass(thing, GradientCompressor)}


def test_each_scheme_once():
    made = [type(make()) for make in schemes(*EVERY).values()]
    assert len(made) == len(set(made)) and set(made) == exported()


def test_no_two_cases_are_the_same():
    calls = [(type(make()), repr(getattr(make, "keywords", {}))) for make in CASES.values()]
    assert len(set(calls)) == len(calls)


def test_a_call_overrides_shared_keywords():
    make = scheme("qsgd-4", bucket_size=64)
    assert make().settings.bucket_size == 64
    assert make(bucket_size=7).settings.bucket_size == 7
