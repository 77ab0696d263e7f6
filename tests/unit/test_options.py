"""Settings that are given in one object: of an exchange, and of memory and threads."""

from __future__ import annotations

import copy
import pickle

import pytest
from states import through_disk

from hvd_adaptive import ALQ, QSGD, Auto, Hierarchical, ScatterReduce, Tuning
from hvd_adaptive.keywords import declared
from hvd_adaptive.options import KINDS

OBJECTS = [
    ("exchange", ScatterReduce(second_stage_bits=4)),
    ("exchange", Hierarchical(ranks_per_node=2, second_stage_bits=32)),
    ("exchange", Auto(second_stage_bits=8)),
    ("tuning", Tuning(in_flight_bytes=2**28)),
    ("tuning", Tuning(checksum=False, worker=False)),
]


@pytest.mark.parametrize(("keyword", "value"), OBJECTS, ids=str)
def test_reprs_states_and_copies_hold_them(keyword, value):
    names = {"ALQ": ALQ, **KINDS}
    assert eval(repr(value), names) == value
    compressor = ALQ(**{keyword: value})
    agreed = type(value)(**{n: v for n, v in vars(value).items() if declared(value)[n].agreed})
    assert f"{keyword}={agreed!r}" in repr(compressor)
    assert getattr(eval(repr(compressor), names).settings, keyword) == agreed
    changed, new = ALQ(), ALQ()
    changed.set(**{keyword: value})
    new.load_state_dict(through_disk(changed.state_dict()))
    for one in (changed, new, copy.deepcopy(compressor), pickle.loads(pickle.dumps(compressor))):
        assert one.settings == compressor.settings
        ours, theirs = (each.parts.default.settings_fingerprint for each in (one, compressor))
        assert ours == theirs


@pytest.mark.parametrize(
    "settings",
    [
        {"exchange": {"ScatterReduce": {"second_stage_bits": 9}}},
        {"exchange": {"Ring": {}}},
        {"exchange": {"Tuning": {}}},
        {"tuning": {"Tuning": {"in_flight_bytes": "all"}}},
        {"worker": False},
    ],
    ids=str,
)
def test_damaged_states_change_nothing(settings):
    compressor = ALQ()
    before = repr(compressor)
    with pytest.raises(ValueError, match=r"state: settings .* do not fit"):
        compressor.load_state_dict(compressor.state_dict() | {"settings": settings})
    assert repr(compressor) == before


def test_the_worker_may_differ_between_ranks_and_change():
    one, other = ALQ(), ALQ(tuning=Tuning(worker=False))
    assert one.parts.default.settings_fingerprint == other.parts.default.settings_fingerprint
    codec = one.parts.default
    one.set(tuning=Tuning(worker=False))
    assert not one.settings.tuning.worker and one.parts.default is codec
    one.set(tuning=Tuning(checksum=False))
    assert one.settings.tuning == Tuning(checksum=False)
    assert one.parts.default.settings_fingerprint != other.parts.default.settings_fingerprint


@pytest.mark.parametrize("name", ["scatter_reduce", "hierarchical", "auto"])
def test_names_stand_for_objects_with_defaults(name):
    (kind,) = (kind for kind in KINDS.values() if getattr(kind, "name", None) == name)
    settings = QSGD(exchange=kind()).settings
    assert settings.exchange == name and settings == QSGD(exchange=name).settings
    assert QSGD(exchange=kind(second_stage_bits=5)).report()["exchange"] == name


PLACES = {
    "second_stage_bits": "exchange=ScatterReduce(second_stage_bits=...)",
    "ranks_per_node": "exchange=Hierarchical(ranks_per_node=...)",
    "worker": "tuning=Tuning(worker=...)",
    "check_sum": "tuning=Tuning(checksum=...)",
}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        *(
            (lambda k=keyword: ALQ(**{k: 4}), TypeError, f"keyword {keyword!r}; did you mean {at}?")
            for keyword, at in PLACES.items()
        ),
        (lambda: ALQ().set(worker=4), TypeError, "did you mean tuning=Tuning(worker=...)?"),
        (lambda: ScatterReduce(4), TypeError, "such as ScatterReduce(second_stage_bits=4)"),
        (
            lambda: Hierarchical(rank_per_node=4),
            TypeError,
            "Hierarchical() has no keyword 'rank_per_node'; did you mean 'ranks_per_node'?",
        ),
        *(
            (lambda b=bits: ScatterReduce(second_stage_bits=b), ValueError, "integer from 2 to 8")
            for bits in (1, 9, 2.0, True, "4", 0, 16)
        ),
        (lambda: Hierarchical(ranks_per_node=True), ValueError, "=True: must be an integer >= 1"),
        (lambda: Tuning(in_flight_bytes=None), ValueError, "=None: must be an integer >= 4096"),
        (lambda: Tuning(worker=1), ValueError, "worker=1: must be True or False"),
        (lambda: ALQ(tuning=ScatterReduce()), ValueError, "must be a Tuning, such as"),
    ],
)
def test_what_is_wrong_is_named(make, error, message):
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)
