"""Hypothesis draws cases of training from all settings."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from oracle import cases
from oracle.training import Case

EXCHANGES = ("allgather", "scatter_reduce", "hierarchical", "auto")


@st.composite
def travels(draw: st.DrawFn, keywords: dict, ranks: int, ways: Sequence[str]) -> str:
    """Adds an exchange and what belongs to it; returns what "auto" is to choose."""
    way = keywords["exchange"] = draw(st.sampled_from(ways))
    several, fastest = [n for n in (1, 2, 3) if ranks % n == 0], ""
    if way == "auto":
        several_stages = {2: [], 4: ["scatter_reduce", "hierarchical"]}
        labels = ["float32", "bfloat16", "allgather"]
        labels += several_stages.get(ranks, ["scatter_reduce"])
        fastest = draw(st.sampled_from(labels))
        keywords["ranks_per_node"] = 2 if fastest == "hierarchical" else None
    if way == "hierarchical":
        keywords["ranks_per_node"] = draw(st.sampled_from([None, *several]))
    if way != "allgather":
        # The default is measured with the codec, which takes a moment.
        bits = draw(st.sampled_from([2, 3, 4, 6, 8, 8, 32, 32, None]))
        certain = keywords["bucket_size"] == 1 or keywords.get("density") == 1.0
        keywords["second_stage_bits"] = 8 if bits is None and certain else bits
    if way in ("allgather", "scatter_reduce") and draw(st.booleans()):
        keywords["error_feedback"] = draw(st.sampled_from([0.05, 0.5, 1.0]))
    return fastest


@st.composite
def changes(draw: st.DrawFn, keywords: dict) -> dict:
    """Keywords to set in the middle of training: mostly none."""
    able = [{}, {}, {}, {}, {"fusion_bytes": 3000}, {"min_numel": 0}, {"tail": "full"}]
    able += [{"clip": 2.0}, {"exchange": "allgather"}, {"seed": 5}, {"scope": "tensor"}]
    if keywords.get("bits") and "coding" in keywords:
        able.append({"bits": 5})
    if keywords.get("error_feedback"):
        able.append({"error_feedback": 0.7})
    return draw(st.sampled_from(able))


@st.composite
def training(draw: st.DrawFn, sizes: Sequence[int], ways: Sequence[str] = EXCHANGES) -> Case:
    """A case from all settings, for one of these numbers of ranks."""
    scheme, keywords = draw(cases.compressors())
    ranks = draw(st.sampled_from(sizes))
    fastest = draw(travels(keywords, ranks, ways))
    keywords |= {
        "seed": draw(st.integers(0, 1000)),
        "min_numel": draw(st.sampled_from([0, 1, 100, 1024])),
        "fusion_bytes": draw(st.sampled_from([400, 4000, 20_000, 2**24])),
        "warmup_steps": draw(st.sampled_from([0, 0, 0, 1])),
        "scope": draw(st.sampled_from(["network", "network", "tensor"])),
        "checksum": draw(st.booleans()),
    }
    if draw(st.integers(0, 2)) == 0:
        whole = [None, 2, 5, 8] if scheme in ("ALQ", "AMQ", "NUQSGD") else [None]
        keywords["parameter_bits"] = {"*.1": draw(st.sampled_from(whole))}
    if "coding" in keywords or scheme == "ECDQ":
        keywords["update_steps"] = draw(st.sampled_from([(), (0,), (0, 1, 2), (1,)]))
        keywords["samples"] = draw(st.sampled_from([2, 20]))
    shapes = st.sampled_from([(1,), (7,), (64,), (300,), (20, 50), (1500,), (50, 51)])
    return Case(
        scheme,
        keywords,
        ranks,
        shapes=draw(st.lists(shapes, min_size=1, max_size=6)),
        dtypes=draw(st.lists(st.sampled_from(cases.DTYPES), min_size=1, max_size=2)),
        steps=draw(st.integers(1, 4)),
        law=draw(st.sampled_from(cases.LAWS)),
        seed=draw(st.integers(0, 2**31)),
        alike=draw(st.booleans()),
        summed=draw(st.booleans()),
        fastest=fastest,
        then=draw(changes(keywords)),
        missing=draw(st.sampled_from(["", "", "one", "all"])),
        broken=draw(st.sampled_from([-1, -1, -1, 0, 1])),
    )
