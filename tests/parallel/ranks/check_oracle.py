"""Every scheme, exchange, coding and option against the exact average (tests/oracle).

A case is wrong if a coordinate is impossible, or if an error is larger than its exact variance
allows, at five sigma, on any rank; or if ranks differ in a bit.
"""

from __future__ import annotations

import os

import horovod.torch as hvd
import pytest
from conftest import ALL
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from oracle_steps import Case, cases, judge_case, wrong_in

# Ten parts of thirty cases; `make ranks` takes ten times as many, other ones under each launcher.
PARTS, CASES = 10, 30
TIMES = 10 if ALL in os.environ else 1

SMALL = {"bucket_size": 64, "min_numel": 0, "update_steps": [0, 1]}
SHAPES = [(300,), (40, 30), (7,), (900,)]
TABLES = {
    "ALQ": {"bits": 3},
    "ALQ-linf-8": {"bits": 8, "norm": "linf", "symmetric": False},
    "AMQ": {"bits": 4},
    "QSGD": {"bits": 4},
    "QSGD-linf-8": {"bits": 8, "norm": "linf"},
    "NUQSGD": {"bits": 4},
    "TernGrad": {},
}
OTHERS = {
    "ORQ": {"levels": 5},
    "LinearQuantile": {"levels": 10},
    "BinGrad": {},
    "BinGrad-biased": {"variant": "biased"},
    "SignSGD": {},
    "OneBitSGD": {"error_feedback": None},
    "NaturalCompression": {},
    "SparseSGD": {"density": 0.2},
    "ECDQ": {"bits": 3.0, "update_steps": [0, 1]},
    "QCS": {"measurements": 48, "quantizer_range": 3},
}
WAYS = {
    "allgather": {"exchange": "allgather"},
    "scatter_reduce": {"exchange": "scatter_reduce"},
    "scatter_reduce-8": {"exchange": "scatter_reduce", "second_stage_bits": 8},
    "scatter_reduce-32": {"exchange": "scatter_reduce", "second_stage_bits": 32},
    **{
        f"hierarchical-{n}": {"exchange": "hierarchical", "ranks_per_node": n, "second_stage_bits": 8}
        for n in (1, 2, 3)
    },
}
OPTIONS = {
    "plain": {},
    "warm-up": {"warmup_steps": 1},
    "warm-up-biases": {"warmup_steps": 3, "min_numel": 1000},
    "small tensors as they are": {"min_numel": 1024},
    "parameter_bits": {"parameter_bits": {"*.1": 8, "*.3": None}},
    "tensors": {"scope": "tensor"},
    "tensors with bits": {"scope": "tensor", "parameter_bits": {"*.1": 2}},
    "feedback": {"error_feedback": 0.3},
    "tail": {"tail": "full"},
    "tail, small": {"tail": "full", "min_numel": 100, "fusion_bytes": 2000},
    "groups": {"fusion_bytes": 2000},
    "groups one at a time": {"fusion_bytes": 2000, "in_flight_bytes": 20_000},
    "clip": {"clip": 1.5},
    "large buckets": {"bucket_size": 8192},
}
MODELS = {
    "layers without biases": [(128, 128)] * 24,
    "layers with biases": [(128, 128), (128,)] * 12,
    "mlp": [(256, 784), (256,), (256, 256), (256,), (10, 256), (10,)],
}
# Groups that are gathered, from five layers each: a layer of a quarter of a group travels alone.
FUSION = {"fusion_bytes": 5 * 4 * 128 * 128 + 4096}
IN_MODELS = {
    "defaults": {},
    "several groups": FUSION,
    "warm-up": FUSION | {"warmup_steps": 2},
    "no least size": FUSION | {"min_numel": 0},
    "bits": FUSION | {"parameter_bits": {"*.2": 4, "*.4": None}},
    "tail": FUSION | {"tail": "full"},
}


def nodes_fit(keywords: dict) -> bool:
    return hvd.size() % (keywords.get("ranks_per_node") or 1) == 0


def judged(name: str, keywords: dict, **of_case) -> None:
    """The case of a scheme's name up to its dash; skipped if nodes do not divide the ranks."""
    if not nodes_fit(keywords):
        pytest.skip(f"{keywords['ranks_per_node']} ranks a node do not divide {hvd.size()}")
    judge_case(Case(name.partition("-")[0], keywords, **of_case))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("coding", ["fixed", "huffman", "elias"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_codings_and_exchanges(name, coding, way):
    if coding == "elias" and name in ("ALQ", "AMQ"):
        pytest.skip("Elias codes need a level zero")
    judged(name, SMALL | TABLES[name] | WAYS[way] | {"coding": coding}, shapes=SHAPES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_schemes_and_exchanges(name, way):
    shared = {"bucket_size": 64, "min_numel": 0}
    judged(name, shared | OTHERS[name] | WAYS[way], shapes=SHAPES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["ALQ", "QSGD-linf-8"])
def test_options_and_exchanges(name, option, way):
    keywords = SMALL | TABLES[name] | WAYS[way] | OPTIONS[option]
    if "error_feedback" in keywords and way.startswith("hierarchical"):
        pytest.skip("not allowed")
    judged(name, keywords, shapes=SHAPES, steps=4)


@pytest.mark.parametrize("fastest", ["float32", "bfloat16", "allgather", "scatter_reduce"])
@pytest.mark.parametrize("name", ["ALQ", "QSGD-linf-8", "ECDQ", "SparseSGD"])
def test_what_auto_chooses(name, fastest):
    keywords = SMALL | (TABLES | OTHERS)[name] | {"exchange": "auto", "second_stage_bits": 8}
    if name == "SparseSGD":
        del keywords["update_steps"]
    judged(name, keywords, shapes=SHAPES, fastest=fastest)


@pytest.mark.parametrize("way", ["allgather", "scatter_reduce-8", *list(WAYS)[-3:]])
@pytest.mark.parametrize("option", IN_MODELS)
@pytest.mark.parametrize("model", MODELS)
def test_models(model, option, way):
    keywords = {"bits": 8, "norm": "linf", "bucket_size": 1024} | WAYS[way] | IN_MODELS[option]
    judged("QSGD", keywords, shapes=MODELS[model], law="normal", steps=3)


@st.composite
def training(draw: st.DrawFn) -> Case:
    """A case from all settings."""
    scheme, keywords = draw(cases.compressors())
    fastest, way = "", draw(st.sampled_from(["allgather", "scatter_reduce", "hierarchical", "auto"]))
    keywords["exchange"] = way
    several = [n for n in (1, 2, 3) if hvd.size() % n == 0]
    if way == "auto":
        nodes = ["hierarchical"] if 2 in several[1:] and hvd.size() > 2 else []
        fastest = draw(st.sampled_from(["float32", "bfloat16", "allgather", "scatter_reduce", *nodes]))
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
    sizes = st.sampled_from([(1,), (7,), (64,), (300,), (20, 50), (1500,), (50, 51)])
    return Case(
        scheme,
        keywords,
        shapes=draw(st.lists(sizes, min_size=1, max_size=6)),
        dtypes=draw(st.lists(st.sampled_from(cases.DTYPES), min_size=1, max_size=2)),
        steps=draw(st.integers(1, 4)),
        law=draw(st.sampled_from(cases.LAWS)),
        seed=draw(st.integers(0, 2**31)),
        alike=draw(st.booleans()),
        summed=draw(st.booleans()),
        fastest=fastest,
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_cases_drawn_from_all_settings(part):
    """The first rank draws; the others are sent its cases, and then nothing."""
    if hvd.rank():
        while (case := hvd.broadcast_object(None, 0, name="oracle.case")) is not None:
            found = wrong_in(case)
            assert not found, f"{case}\n{found[:12]}"
        return
    gloo = os.environ.get("HOROVOD_CONTROLLER") == "gloo"

    @seed(1000 * part + 10 * hvd.size() + gloo)
    @settings(
        max_examples=CASES * TIMES, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(training())
    def draw(case: Case) -> None:
        hvd.broadcast_object(case, 0, name="oracle.case")
        judge_case(case)

    draw()
    hvd.broadcast_object(None, 0, name="oracle.case")
