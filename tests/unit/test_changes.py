"""Settings that change in the middle of training, without Horovod."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from scheme_cases import EVERY, scheme
from states import through_disk

from hvd_adaptive import ALQ, ECDQ, QSGD, ScatterReduce, Tuning
from hvd_adaptive.changes import begin_step
from hvd_adaptive.coding.payload import read_header as header

FLAT = torch.randn(5000, generator=torch.Generator().manual_seed(1))


def fitted(**keywords) -> ALQ:
    compressor = ALQ(**{"bits": 3, "bucket_size": 100} | keywords)
    compressor.fit(FLAT**3)
    compressor.step = 7
    compressor._training.updates.schedule.done(6, complete=True)
    return compressor


def due(compressor, first: int, count: int = 60) -> list[int]:
    return [step for step in range(first, first + count) if compressor._training.updates.due(step)]


OF_ALL = {"bucket_size": 256, "exchange": "scatter_reduce"}


@pytest.mark.parametrize(
    ("label", "changes"),
    [
        *((label, OF_ALL) for label in EVERY),
        ("qsgd-3", {"bits": None, "intervals": 5}),
        ("nuqsgd-3", {"multiplier": 0.25}),
        ("terngrad", {"clip": None}),
        ("ecdq-2", {"bits": None, "relative_variance": 0.1}),
    ],
    ids=str,
)
def test_every_scheme_changes_in_place(label, changes):
    """What a change makes is what the constructor would: payloads, settings, fingerprint."""
    make = scheme(label)
    compressor, other = make(), make(**changes, min_numel=9)
    compressor.step = 5
    compressor.set(**changes, min_numel=np.int64(9))
    assert compressor.settings == other.settings and repr(compressor) == repr(other)
    codecs = [each.parts.default for each in (compressor, other)]
    assert codecs[0].settings_fingerprint == codecs[1].settings_fingerprint
    assert torch.equal(compressor.encode(FLAT, seed=3), other.encode(FLAT, seed=3))
    state = through_disk(compressor.state_dict())
    assert state["settings"] == changes | {"min_numel": 9}
    new = make()
    new.load_state_dict(state)
    assert repr(new) == repr(other) and new.step == 5
    new.load_state_dict(make().state_dict())
    assert repr(new) == repr(make()), "a state without changes takes them back"


@pytest.mark.parametrize("label", EVERY)
def test_copies_go_on_like_the_original(label):
    compressor = scheme(label)(bucket_size=512)
    compressor.encode(FLAT)
    copies = [copy.deepcopy(compressor), pickle.loads(pickle.dumps(compressor))]
    payload = compressor.encode(FLAT)
    assert all(torch.equal(one.encode(FLAT), payload) for one in copies)
    if hasattr(compressor, "fit"):
        compressor.fit(FLAT)
        assert all(one.parts.default.table_version == 0 for one in copies)


def test_copies_of_schedules_that_are_generators():
    compressor = ALQ(update_steps=(step for step in (3, 5, 40)))
    assert due(compressor, 0, 6) == [3, 5]
    other = copy.deepcopy(compressor)
    assert due(other, 0) == due(compressor, 0) == [3, 5, 40]
    other._training.updates.schedule.done(40, complete=False)
    assert due(other, 41) == [41] and due(compressor, 41) == []


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({"fusion_bytes": 10_000, "warmup_steps": 9, "seed": 4}, True),
        ({"tuning": Tuning(checksum=False)}, True),
        ({"bucket_size": 200}, False),
        ({"error_feedback": 0.5}, False),
        ({"norm": "l2"}, False),
    ],
    ids=str,
)
def test_tables_go_on_and_are_refitted_at_once_where_need_be(changes, stays):
    compressor = fitted(update_steps=[20])
    levels = compressor.levels
    compressor.set(**changes)
    assert torch.equal(compressor.levels, levels) and compressor.parts.default.table_version == 1
    assert due(compressor, 7) == ([20] if stays else [7, 20])


def test_without_checksums_averages_travel_so_too_with_the_table_that_they_had():
    compressor = fitted(update_steps=[20], exchange=ScatterReduce(second_stage_bits=5))
    second = compressor.parts.default.second_stage(4).codec
    second.fit(FLAT)
    assert header(second.payloads.encode(FLAT, FLAT.numel(), 0).bytes).checksum != 0
    compressor.set(tuning=Tuning(checksum=False))
    kept = compressor.parts.default.second_stage(4).codec
    assert kept.table_version == 1 and torch.equal(kept.levels, second.levels)
    assert header(kept.payloads.encode(FLAT, FLAT.numel(), 0).bytes).checksum == 0
    assert header(compressor.encode(FLAT)).checksum == 0
    assert due(compressor, 7) == [20] and not compressor._training.updates.at(7).second


def test_other_bits_start_from_their_own_table_and_are_fitted_at_once():
    compressor = fitted(update_steps=iter([0, 20]))
    compressor.set(bits=4)
    first = ALQ(bits=4, bucket_size=compressor.settings.bucket_size)
    assert torch.equal(compressor.levels, first.levels)
    assert compressor.parts.default.table_version == 1
    assert due(compressor, 7) == [7, 20]
    compressor.fit(FLAT)
    assert compressor.parts.default.table_version == 2
    compressor.set(bits=3)
    assert len(compressor.levels) == 7


def test_a_table_that_the_user_gave_is_not_installed_again():
    table = [-1.0, -0.5, 0.5, 1.0]
    compressor = ALQ(bits=2, symmetric=True, table=table)
    compressor.set(exchange="scatter_reduce")
    assert compressor.levels.tolist() == table
    with pytest.raises(TypeError, match="cannot change 'table'"):
        compressor.set(table=np.array(table))
    compressor.set(bits=3)
    assert len(compressor.levels) == 8


def test_a_book_is_fitted_at_once():
    compressor = QSGD(update_steps=[0])
    compressor.set(coding="huffman")
    assert due(compressor, 0) == [0] and compressor.parts.default.coder is None
    compressor.fit(FLAT)
    compressor.set(exchange="scatter_reduce")
    assert compressor.parts.default.coder is not None, "the book is part of the table"
    compressor.set(coding="fixed")
    assert compressor.parts.default.coder is None


def test_rate_control_starts_anew_with_another_budget():
    compressor = ECDQ(bits=2.0, bucket_size=512, update_steps=[])
    codec = compressor.parts.default
    for step in range(3):
        codec.apply_update(codec.refit([codec.collect(FLAT.split(512)[:9])]), step)
        codec.count(codec.payloads.encode(FLAT, FLAT.numel(), step))
    spent, ratio = codec._control.bits, codec._control.ratio
    assert spent > 0 and ratio != 1
    compressor.set(exchange="scatter_reduce")
    codec = compressor.parts.default
    assert codec._control.bits == spent and codec._sent[0] > 0
    compressor.set(bits=3.0)
    codec = compressor.parts.default
    assert (codec._control.bits, codec._control.ratio, codec._control.budget) == (0, ratio, 3.0)
    assert not codec._sent.any()
    compressor.step = 3
    assert compressor._training.updates.schedule.is_due(0), "as set() was called before step 0"


def test_parts_keep_their_tables():
    compressor = ALQ(bucket_size=100, parameter_bits={"a": 4, "b": 5})
    for label, codec in compressor.parts.items():
        codec.fit(FLAT ** (3 if label else 5))
    before = {label: codec.levels for label, codec in compressor.parts.items()}
    compressor.set(warmup_steps=3, parameter_bits={"a": 4, "c": 6})
    assert list(compressor.parts) == ["", "bits=4", "bits=6"]
    for label in ("", "bits=4"):
        assert torch.equal(compressor.parts[label].levels, before[label])
    assert compressor.parts["bits=6"].table_version == 0
    tensors = ALQ(bucket_size=100, scope="tensor")
    tensors.parts["w"].fit(FLAT)
    levels = tensors.parts["w"].levels
    tensors.set(exchange="scatter_reduce")
    assert torch.equal(tensors.parts["w"].levels, levels)
    tensors.set(scope="network")
    assert list(tensors.parts) == [""]


def test_what_is_so_already_changes_nothing():
    compressor = fitted(update_steps=[20], bits=3)
    inner = compressor._training.updates.schedule
    compressor.set(bits=3, symmetric=False, norm="linf")
    assert compressor._training.updates.schedule is inner and due(compressor, 7) == [20]
    compressor.set()
    assert compressor._training.updates.schedule is inner
    compressor.set(symmetric=False, keep_zeros=False, fusion_bytes=4096)  # two are the defaults
    assert compressor._changed == {"fusion_bytes": 4096} and due(compressor, 7) == [20]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"bits": 9}, ValueError, "bits=9: must be an integer from 2 to 8"),
        ({"bit": 4}, TypeError, "no keyword 'bit'"),
        ({"update_steps": [1]}, TypeError, "cannot change 'update_steps'"),
        ({"schedule": None}, TypeError, "cannot change 'schedule'"),
        ({"exchange": "hierarchical", "error_feedback": 1.0}, ValueError, "error_feedback=1.0"),
    ],
    ids=str,
)
def test_wrong_changes_are_refused_and_change_nothing(keywords, error, message):
    compressor = fitted()
    before = repr(compressor)
    with pytest.raises(error, match=message):
        compressor.set(**keywords)
    assert repr(compressor) == before and not begin_step(compressor)
    with pytest.raises(ValueError, match="state: settings"):
        compressor.load_state_dict(compressor.state_dict() | {"settings": keywords})
    assert repr(compressor) == before


def test_a_schedule_is_asked_once_a_step():
    asked = []

    def schedule(step):
        asked.append(step)
        return {0: None, 1: {"bits": 4}, 2: {"bits": 4}, 3: {"bits": 2, "norm": "linf"}}[step]

    compressor, seen = ALQ(schedule=schedule), []
    for step in range(4):
        compressor.step = step
        changed = [begin_step(compressor) for _ in range(2)]
        seen.append((changed, compressor.parts.default.table.bits))
    assert asked == [0, 1, 2, 3]
    assert seen == [
        ([False, False], 3),
        ([True, False], 4),
        ([False, False], 4),
        ([True, False], 2),
    ]
    assert compressor.parts.default.norm == "linf"
    resumed = ALQ(schedule=schedule)
    resumed.load_state_dict(through_disk(compressor.state_dict()))
    assert repr(resumed) == repr(compressor) and resumed.settings.schedule is schedule


def test_a_schedule_must_return_keywords():
    with pytest.raises(ValueError, match="schedule: returned 4 for step 0"):
        begin_step(ALQ(schedule=lambda step: 4))
