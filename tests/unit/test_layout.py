"""Fusion groups: every coordinate travels once, the same way whatever the order of arrival."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.exchange.exchange import AllgatherExchange, RankInfo
from hvd_adaptive.hooks.ddp.buckets import by_bucket
from hvd_adaptive.layout import ALONE, FIRST, Group, Layout, Member, build_layout

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PARTS = ("", "", "bits=4", "conv.weight", None)
shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple),
    st.integers(0, 3000).map(lambda n: (n,)),
)
# No numbers with leading zeros here: see the last tests.
names = st.from_regex(r"[a-z]{1,3}(\.(0|[1-9][0-9]{0,2}|[a-z]{1,4})){0,3}", fullmatch=True)
members_lists = st.lists(
    st.builds(Member, names, shapes, st.sampled_from(DTYPES), st.sampled_from(PARTS)),
    max_size=25,
    unique_by=lambda m: m.name,
)
options = st.fixed_dictionaries(
    {
        "min_numel": st.sampled_from((0, 1, 10, 100, 1024)),
        "bucket_size": st.sampled_from((1, 3, 16, 100, 8192)),
        "tail": st.sampled_from(("quantize", "full")),
        "most_coordinates": st.sampled_from((1, 7, 64, 500, 2000, 10**6)),
    }
)


def numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) if shape else 1


def quantised(member: Member, options: dict) -> bool:
    return member.part is not None and numel(member.shape) >= options["min_numel"]


@given(members_lists, options)
def test_build_layout(members, options):
    layout = build_layout(members, **options)
    check_every_coordinate_once(layout, members)
    check_quantised_before_full_precision(layout, options)
    check_bounds_and_cuts(layout, members, options)
    check_large_members(layout, options)
    check_parts(layout, members, options)
    check_first_groups(layout, members, options)


def check_every_coordinate_once(layout, members):
    assert sorted(m.name for m in layout.members) == sorted(m.name for m in members)
    seen = [np.zeros(numel(m.shape), int) for m in layout.members]
    for group in layout.groups:
        at = 0
        for piece in group.pieces:
            assert piece.at == at, "pieces lie end to end"
            assert 0 <= piece.start <= piece.stop <= seen[piece.slot].size
            assert layout.members[piece.slot].dtype == group.dtype
            seen[piece.slot][piece.start : piece.stop] += 1
            at += piece.stop - piece.start
        assert at == group.coordinates == group.quantized + group.full
        assert group.quantized >= 0 and group.full >= 0
        assert group.slots == {piece.slot for piece in group.pieces}
    assert all(np.all(count == 1) for count in seen)
    empty = {slot for slot, member in enumerate(layout.members) if not numel(member.shape)}
    assert empty <= set().union(*(g.slots for g in layout.groups)), "empty tensors take part too"


def check_quantised_before_full_precision(layout, options):
    """Small members and those without a part never among the quantised; others in the full
    section only as a tail shorter than a bucket."""
    for group in layout.groups:
        large = 0
        for piece in group.pieces:
            if quantised(layout.members[piece.slot], options):
                assert piece.at == large, "quantised members lie before all others"
                large += piece.stop - piece.start
        if options["tail"] == "full":
            assert group.quantized == large - large % options["bucket_size"]
        else:
            assert group.quantized == large


def check_bounds_and_cuts(layout, members, options):
    bucket = options["bucket_size"]
    most = max(bucket, options["most_coordinates"] // bucket * bucket)
    for group in layout.groups:
        assert group.coordinates <= most
        for piece in group.pieces:
            whole = numel(layout.members[piece.slot].shape)
            if piece.stop - piece.start < whole:
                assert piece.start % bucket == 0 and (
                    piece.stop % bucket == 0 or piece.stop == whole
                )
    totals: Counter = Counter()
    for m in members:
        totals[m.dtype, m.part if quantised(m, options) else ""] += numel(m.shape)
    counts = Counter((g.dtype, g.part) for g in layout.groups)
    assert counts.keys() == totals.keys()
    for kind, total in totals.items():
        # The first ones are at most as large as what lies before them, at least a FIRST-th.
        assert counts[kind] <= 4 * FIRST.bit_length() + 4 * total // most, "groups are filled"


def check_large_members(layout, options):
    bucket = options["bucket_size"]
    most = max(bucket, options["most_coordinates"] // bucket * bucket)
    for slot, member in enumerate(layout.members):
        if 4 * member.numel >= most:
            groups = [layout.groups[index] for index, _ in layout.pieces_of[slot]]
            assert all(len(group.pieces) == 1 for group in groups)
            buckets = [-(-group.coordinates // bucket) for group in groups]
            fewest = -(-member.numel // most)
            assert fewest <= len(groups) <= max(fewest, ALONE)
            assert max(buckets) - min(buckets) <= 1


def check_parts(layout, members, options):
    """Its own quantised members; whatever travels in full precision is in the default part's."""
    for group in layout.groups:
        for slot in group.slots:
            member = layout.members[slot]
            assert group.part == (member.part if quantised(member, options) else "")
    labels = AllgatherExchange(RankInfo(1, 0)).parts_among(layout.groups)
    used = {g.part for g in layout.groups if g.quantized}
    assert set(labels) == (used or {""}) and len(labels) == len(set(labels))
    firsts = [min(registered(group, layout, members)) for group in layout.groups]
    assert firsts == sorted(firsts), "groups become complete in the launch's reverse order"


def check_first_groups(layout, members, options):
    bucket = options["bucket_size"]
    most = max(bucket, options["most_coordinates"] // bucket * bucket)
    for group in layout.groups:
        later = sum(m.numel for m in members[: min(registered(group, layout, members))])
        limit = max(bucket, most // FIRST, later)
        if len(group.pieces) > 1:
            assert group.coordinates <= limit
            continue
        whole = layout.members[group.pieces[0].slot].numel
        assert group.coordinates < max(limit, -(-whole // ALONE)) + bucket or ALONE * whole < most


def registered(group: Group, layout: Layout, members: list[Member]) -> list[int]:
    return [members.index(layout.members[slot]) for slot in group.slots]


@given(members_lists, options, st.randoms(use_true_random=False))
def test_order_of_the_members(members, options, shuffler):
    """Slots and identity do not depend on it; groups do not either if they follow names."""
    layout = build_layout(members, **options)
    shuffled = list(members)
    shuffler.shuffle(shuffled)
    other = build_layout(shuffled, **options)
    assert (other.members, other.identity) == (layout.members, layout.identity)
    by_name = build_layout(members, **options, by_name=True)
    assert build_layout(shuffled, **options, by_name=True) == by_name
    assert build_layout(layout.members, **options) == by_name
    kept = build_layout(shuffled, **options, as_given=True, before=None)
    assert kept.members == shuffled


@given(members_lists.filter(len), options, st.data())
def test_fingerprint_changes_with_any_name_shape_dtype_part_or_cut(members, options, data):
    before = build_layout(members, **options)
    index = data.draw(st.integers(0, len(members) - 1))
    member = members[index]
    changes = [
        {"shape": (*member.shape, 1)},
        {"shape": (numel(member.shape) + 1,)},
        {"dtype": DTYPES[(DTYPES.index(member.dtype) + 1) % 4]},
    ]
    if member.name + "x" not in {m.name for m in members}:
        changes.append({"name": member.name + "x"})
    if quantised(member, options):
        changes.append({"part": "another"})
    others = [[*members[:index], *members[index + 1 :]]]
    for change in changes:
        others.append(list(members))
        others[-1][index] = dataclasses.replace(member, **change)
    for other in others:
        assert build_layout(other, **options).fingerprint != before.fingerprint, other
    cut = build_layout(members, **options | {"min_numel": 50, "tail": "full"})
    assert (cut.fingerprint == before.fingerprint) == (cut.groups == before.groups)
    assert 0 <= before.fingerprint < 2**64


def test_natural_order():
    names = ["layer.0.w", "layer.1.w", "layer.2.w", "layer.10.w", "layer.10.x", "layer.100.w"]
    shuffled = random.Random(1).sample(names, len(names))
    members = [Member(n, (5,), torch.float32) for n in shuffled]
    options = {"min_numel": 4, "bucket_size": 8, "tail": "quantize", "most_coordinates": 100}
    assert [m.name for m in build_layout(members, **options).members] == names


def test_a_layout_does_not_change_unnoticed():
    """Payloads carry this number: ranks of two versions must not take each other's for theirs."""
    sizes = [
        (5, torch.float32),
        (2, torch.float32),
        (40, torch.float16),
        (9, torch.float32),
        (30, torch.float16),
    ]
    members = [Member(f"layer.{i}", (n,), dtype) for i, (n, dtype) in enumerate(sizes)]
    layout = build_layout(members, min_numel=3, bucket_size=8, tail="full", most_coordinates=20)
    assert layout.fingerprint == 0x65BB3983878512


def test_a_worked_example():
    """Groups of at most 16 in buckets of 8: a (3), b (2, small), c (40), d (3)."""
    shapes = {"a": 3, "b": 2, "c": 40, "d": 3}
    members = [Member(n, (s,), torch.float32) for n, s in shapes.items()]
    layout = build_layout(members, min_numel=3, bucket_size=8, tail="quantize", most_coordinates=20)
    told = [[(p.slot, p.start, p.stop, p.at) for p in g.pieces] for g in layout.groups]
    assert told == [
        [(0, 0, 3, 0), (3, 0, 3, 3), (1, 0, 2, 6)],
        [(2, 0, 8, 0)],
        [(2, 8, 24, 0)],
        [(2, 24, 40, 0)],
    ]
    assert [(g.quantized, g.full) for g in layout.groups] == [(6, 2), (8, 0), (16, 0), (16, 0)]


@pytest.mark.parametrize("table", [400_000, 8_000_000])
def test_groups_leave_during_the_backward_pass(table):
    """Layers of a model whose embedding comes first: the last ones do not wait for the others."""
    layers = [Member(f"layer.{i}", (100_000,), torch.float32) for i in range(64)]
    members = [Member("embedding", (table,), torch.float32), *layers]
    layout = build_layout(
        members, min_numel=1024, bucket_size=8192, tail="quantize", most_coordinates=2**22
    )
    bound = max(2**19, (table + 6_400_000) // 8)
    sizes = [group.coordinates for group in layout.groups]
    assert max(sizes) <= bound
    assert min(sizes[2:-1]) > bound / 2, "groups are filled"
    buckets = [members[:20], members[20:]]
    bounds = {"min_numel": 1024, "bucket_size": 8192, "tail": "quantize"}
    in_turn = by_bucket(buckets, in_turn=True, most_coordinates=2**22, **bounds)
    assert max(group.coordinates for group in in_turn.groups) <= bound
    at_once = by_bucket(buckets, in_turn=False, most_coordinates=2**22, **bounds)
    assert max(group.coordinates for group in at_once.groups) > 2 * bound
