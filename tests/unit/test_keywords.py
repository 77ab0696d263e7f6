"""Errors about keywords that a scheme does not have."""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
import torch

from hvd_adaptive import ALQ, ORQ, QSGD, Monitor, ScatterReduce, SignSGD
from hvd_adaptive.coding import CODINGS
from hvd_adaptive.custom import Scheme, Settings
from hvd_adaptive.keywords import own_keywords
from hvd_adaptive.options import EXCHANGE_NAMES
from hvd_adaptive.settings import Shared
from hvd_adaptive.tools.schemes.catalog import scheme_classes

NEEDED = {"ECDQ": {"bits": 2.0}, "SparseSGD": {"density": 0.1}}


@pytest.mark.parametrize(
    ("make", "nearest", "others"),
    [
        (lambda: ALQ(bit=3), "bits", "ALQ's own keywords are bits=3, norm='linf'"),
        (lambda: ORQ(bits=3), "levels", "ORQ's own keywords are levels=9, solver="),
        (lambda: ALQ(bits=3, bucketsize=512), "bucket_size", "shared keywords are exchange"),
        (lambda: SignSGD(errorfeedback=1.0), "error_feedback", "shared keywords are exchange"),
    ],
)
def test_unknown_keywords(make, nearest, others):
    with pytest.raises(TypeError, match=f"did you mean '{nearest}'") as raised:
        make()
    assert others in str(raised.value)


@pytest.mark.parametrize("name", scheme_classes())
def test_public_members_are_those_of_the_reference(name):
    """What a person sees in ``dir()``; the package's own modules use ``_training``."""
    made = scheme_classes()[name](**NEEDED.get(name, {}))
    horovods, alone = {"compress", "decompress"}, {"encode", "decode", "fit", "levels"}
    state = {"state_dict", "load_state_dict", "report", "set", "close"}
    seen = {member for member in dir(made) if not member.startswith("_")}
    assert seen <= horovods | alone | state | {"settings", "step", "parts"}


WRONG = {
    "scope": ("must be one of 'network', 'tensor'", ["layer", None, ["tensor"]]),
    "parameter_bits": ("must be a mapping of name patterns", ["conv*", [("a", 4)], {3: 4}]),
    "schedule": ("must be a function of the step, or None", [3]),
    "grad_scaler": ("must be a torch.amp.GradScaler, or None", [1024.0, "scaler"]),
    "monitor": ("must be a hvd_adaptive.Monitor, or None", ["runs"]),
    "process_set": ("must be a process set of Horovod (hvd.ProcessSet), or None", [5, [0, 1]]),
}


@pytest.mark.parametrize("keyword", WRONG)
def test_wrong_values_are_named(keyword):
    message, values = WRONG[keyword]
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{keyword}={value!r}: {message}")):
            QSGD(**{keyword: value})


OF_A_RANK = {
    "grad_scaler": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "monitor": Monitor,
    "schedule": lambda: lambda step: None,
}


@pytest.mark.parametrize("keyword", OF_A_RANK)
def test_objects_of_one_rank_are_no_part_of_what_ranks_must_have_alike(keyword):
    value = OF_A_RANK[keyword]()
    compressor, other = ALQ(scope="tensor", **{keyword: value}), ALQ(scope="tensor")
    codecs = compressor.parts.default, other.parts.default
    assert codecs[0].settings_fingerprint == codecs[1].settings_fingerprint
    assert repr(compressor) == repr(other)
    assert getattr(compressor.parts["a"].settings, keyword) is None
    assert getattr(copy.deepcopy(compressor).settings, keyword) is value
    assert compressor.state_dict().keys() == other.state_dict().keys() | {"scope", "parts"}
    with pytest.raises(TypeError, match=f"cannot change '{keyword}'"):
        compressor.set(**{keyword: None})


@pytest.mark.parametrize("name", scheme_classes())
def test_every_scheme_lists_its_own(name):
    kind = scheme_classes()[name]
    kinds = inspect.signature(kind.__init__).parameters
    own = [p.name for p in kinds.values() if p.kind is p.KEYWORD_ONLY]
    with pytest.raises(TypeError, match="has no keyword 'no_such'") as raised:
        kind(no_such=1, **NEEDED.get(name, {}))
    assert own == list(own_keywords(kind)) and "did you mean" not in str(raised.value)
    assert all(one in str(raised.value) for one in own)
    wanted = f"{name}({own[0]}=3)" if own else f"{name}(bucket_size="
    told = f"{name}(3): values must be given by keyword, such as {wanted}"
    with pytest.raises(TypeError, match=re.escape(told)):
        kind(3)


def test_custom_schemes_may_take_values():
    class Own(Scheme):
        def __init__(self, width, **shared):
            self.width = width
            super().__init__(Settings.from_keywords("Own", shared))

        name, alphabet = "Own", 2

        def codec_settings(self):
            return {}

        def body_bytes(self, n):
            return n

        def encode_body(self, flat, body, key):
            return 0

        def add_bodies(self, bodies, keys, factor, out):
            return None

    assert Own(3).width == 3
    with pytest.raises(TypeError, match=r"Own\(\) has no keyword 'sed'; did you mean 'seed'"):
        Own(3, sed=1)


def test_types_name_every_shared_keyword():
    """tests/types/calls.py has calls that mypy accepts, and some that it refuses."""
    assert set(get_type_hints(Shared)) == {field.name for field in fields(Settings)}
    for hint, allowed in [
        (get_type_hints(Shared)["exchange"], {*EXCHANGE_NAMES, ScatterReduce, type(None)}),
        (get_type_hints(Shared)["coding"], set(CODINGS)),
    ]:
        named = {
            value
            for one in (get_args(hint) if type(None) in get_args(hint) else [hint])
            for value in (get_args(one) or [one])
        }
        assert named == allowed
