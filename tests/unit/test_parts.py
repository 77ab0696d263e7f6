"""Parts: which parameter belongs to which, that each has a codec of its own, and their states."""

from __future__ import annotations

import inspect
import logging
import re
from functools import partial

import numpy as np
import pytest
import torch
from states import plain, through_disk

from hvd_adaptive import ALQ, AMQ, NUQSGD, QSGD, TernGrad, Tuning

BITS = {"*.bias": None, "conv1*": 5, "conv*": 4}
NAMES = ["conv1.weight", "conv2.weight", "conv1.bias", "fc.weight", "fc.bias"]
ALL = {"norm": "l2", "symmetric": True, "normalized": True, "statistics": "normal"}
OWN = {
    ALQ: ALL | {"samples": 7, "solver": "gradient_descent"},
    AMQ: ALL | {"samples": 3},
    QSGD: {"norm": "linf", "symmetric": True, "samples": 4, "statistics": "normal"},
    NUQSGD: {"norm": "linf", "multiplier": 0.6, "symmetric": True, "samples": 5}
    | {"statistics": "normal"},
    TernGrad: {"clip": 1.5, "samples": 6, "statistics": "normal"},
}
SHARED = {"bucket_size": 100, "seed": 3, "tail": "full", "clip": 2.0}


def heavy(seed: int, size: int = 2000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) ** (1 + 2 * seed)


@pytest.mark.parametrize(
    ("keywords", "labels", "bits"),
    [
        ({}, ["", "", "", "", ""], {"": 3}),
        (
            {"parameter_bits": BITS},
            ["bits=5", "bits=4", None, "", None],
            {"": 3, "bits=5": 5, "bits=4": 4},
        ),
        (
            {"parameter_bits": BITS, "scope": "tensor"},
            ["conv1.weight", "conv2.weight", None, "fc.weight", None],
            {"": 3, "conv1.weight": 5, "conv2.weight": 4, "fc.weight": 3},
        ),
    ],
)
def test_which_parameter_is_in_which(keywords, labels, bits):
    parts = ALQ(**keywords).parts
    assert "scope" in keywords or list(parts) == list(bits)
    assert [parts.label_of(name) for name in NAMES] == labels
    assert [parts[label].table.bits for label in bits] == list(bits.values())
    assert list(parts) == list(bits) and parts[""] is parts.default


def test_patterns_match_whole_names_and_their_case():
    patterns = {"conv*": 4, "Fc.weight": 5, "x[12]": 6}
    compressor = QSGD(parameter_bits=patterns)
    patterns.clear()
    names = ("layer.conv", "conv", "fc.weight", "Fc.weight.x", "Fc.weight", "x1", "x3")
    labels = [compressor.parts.label_of(name) for name in names]
    assert labels == ["", "bits=4", "", "", "bits=5", "bits=6", ""]
    for without_bits in (TernGrad, partial(QSGD, intervals=5)):
        parts = without_bits(parameter_bits={"*.bias": None}).parts
        assert [parts.label_of("fc.bias"), parts.label_of("fc.weight")] == [None, ""]


def test_unknown_parts():
    with pytest.raises(ValueError, match=r"'bits=4'.*must be one of '', 'bits=5'"):
        ALQ(parameter_bits={"a": 5}).parts["bits=4"]
    with pytest.raises(ValueError, match=r"'fc'.*must be one of ''"):
        ALQ().parts["fc"]
    with pytest.raises(ValueError, match=r"'fc.bias'"):
        ALQ(scope="tensor", parameter_bits=BITS).parts["fc.bias"]


@pytest.mark.parametrize("scheme", OWN, ids=lambda s: s.__name__)
def test_same_keywords_but_for_bits(scheme):
    """Payloads of a part are those of a compressor constructed with its bits, whatever the
    other keywords; all that the scheme names are tried."""
    own = SHARED | OWN[scheme]
    named = set(inspect.signature(scheme).parameters)
    untried = {"bits", "intervals", "table", "update_steps", "shared"}
    assert named - untried <= own.keys()
    flat = heavy(0, 1050)
    bits = {} if scheme is TernGrad else {"bits": 5}
    alone = scheme(**own, **bits)
    whole = scheme(**own, scope="tensor", parameter_bits={"x": bits.get("bits")})
    part = whole.parts["x"] if bits else whole.parts["y"]
    quantized = part.settings.quantized_part(flat.numel())
    payloads = [
        codec.payloads.encode(flat, quantized, 1).bytes for codec in (part, alone.parts.default)
    ]
    assert torch.equal(*payloads)
    assert part.settings_fingerprint == alone.parts.default.settings_fingerprint
    assert part.settings == alone.settings


def test_steps_and_parameters_are_not_shared():
    """Iterables that can be read once go to the compressor alone."""
    steps = iter([0, 5, 50])
    named = ((name, torch.nn.Parameter(torch.zeros(3))) for name in ("a", "b"))
    compressor = ALQ(scope="tensor", update_steps=steps, named_parameters=named)
    assert compressor.parts["a"].settings.named_parameters is None
    assert [s for s in range(60) if compressor._training.updates.due(s)] == [0, 5, 50]
    assert len(compressor.settings.named_parameters) == 2


def test_a_first_table_is_every_tensors():
    table = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1]
    compressor = ALQ(table=table, scope="tensor", parameter_bits={"*.bias": None})
    assert compressor.parts["a"].levels.tolist() == table


@pytest.mark.parametrize(
    ("kind", "keywords", "bits", "said"),
    [
        *((QSGD, {}, bits, "an integer >= 1, or None") for bits in (0, 2.5, "4", True)),
        (ALQ, {}, 9, "bits=9: must be an integer from 2 to 8"),
        (QSGD, {"intervals": 5}, 4, "intervals=5: cannot be given"),
        (ALQ, {"table": [-1, 0, 1], "bits": 2}, 3, "table: must"),
        (NUQSGD, {"multiplier": 0.1}, 8, "multiplier=0.1"),
        (TernGrad, {}, 4, "no keyword 'bits'"),
    ],
)
def test_bits_that_a_scheme_cannot_have_are_refused_at_once(kind, keywords, bits, said):
    with pytest.raises(ValueError, match=said) as caught:
        kind(parameter_bits={"conv*": bits}, **keywords)
    assert re.search(rf"parameter_bits.*'conv\*'.*{bits!r}", str(caught.value))


def test_fingerprints():
    """Whatever assigns parameters otherwise: the patterns' order, too."""

    def fingerprint(compressor) -> int:
        return compressor.parts.default.settings_fingerprint

    made = [
        ALQ(),
        ALQ(scope="tensor"),
        ALQ(parameter_bits={"a*": 4, "ab*": 5}),
        ALQ(parameter_bits={"ab*": 5, "a*": 4}),
        ALQ(parameter_bits={"a*": None, "ab*": 5}),
        ALQ(parameter_bits={"a*": 4, "ab*": 5}, scope="tensor"),
    ]
    assert len(set(map(fingerprint, made))) == len(made)
    assert fingerprint(ALQ(parameter_bits={})) == fingerprint(made[0])
    typed = ALQ(parameter_bits={np.str_("a*"): np.int64(4), "ab*": 5})
    assert fingerprint(typed) == fingerprint(made[2])
    pasted = eval(repr(typed), {"ALQ": ALQ, "Tuning": Tuning})
    assert fingerprint(pasted) == fingerprint(typed)


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["conv*", "conv1*", "*.bias"], "'conv1*' applies to no parameter: earlier patterns"),
        (["Conv*"], "'Conv*' matches no parameter; close names are 'conv1.weight', 'conv2.weight'"),
        (["onv2.weigh"], "'onv2.weigh' matches no parameter; close names are 'conv2.weight'"),
        (["zzz*"], "'zzz*' matches no parameter; names are 'conv1.weight'"),
    ],
)
def test_idle_patterns_are_told_once(patterns, told, caplog):
    compressor = ALQ(parameter_bits=dict.fromkeys(patterns, 4))
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        compressor.parts.warn_of_idle_patterns(NAMES)
        compressor.load_state_dict(compressor.state_dict())
        compressor.parts.warn_of_idle_patterns(NAMES)
    (message,) = caplog.messages
    assert told in message


def test_names_of_horovods_own_are_explained(caplog):
    compressor = ALQ(parameter_bits={"conv*": 4})
    compressor.parts.warn_of_idle_patterns(["allreduce.noname.0.0", "allreduce.noname.0.1"])
    assert caplog.messages[0].endswith("noname.0.1'; give the optimizer named_parameters=")


# Updates of all parts: what one does, each part would do alone ----------------------------------

LABELS = ("a", "b", "c")


def samples(rank: int, empty: tuple = ()):
    def draw(count: int, part: str) -> list[torch.Tensor]:
        scale = 0.0 if (rank, part) in empty else 1.0
        return list((scale * heavy(LABELS.index(part) + 3 * rank, 100 * count)).split(100))

    return draw


def update(compressor: ALQ, step: int, empty: tuple = ()) -> None:
    """As two ranks do; the other one's statistics are collected here."""
    codecs = {label: ALQ(bucket_size=100).parts.default for label in LABELS}
    draw, calls = samples(1, empty), []
    other = np.concatenate([c.joined([c.collect(draw(20, p))]) for p, c in codecs.items()])

    def sync(own, fit):
        calls.append(own)
        return fit([own, other])

    compressor._training.updates.run(step, samples(0, empty), sync, LABELS)
    assert len(calls) == 1, "one sync, however many parts"


def test_each_part_is_fitted_to_its_own_samples():
    compressor = ALQ(bucket_size=100, scope="tensor", parameter_bits={"c": 5})
    update(compressor, 0)
    for label in LABELS:
        alone = ALQ(bucket_size=100, bits=5 if label == "c" else 3).parts.default
        vectors = [alone.collect(samples(rank)(20, label)) for rank in (0, 1)]
        alone.apply_update(alone.refit(vectors), 0)
        assert torch.equal(compressor.parts[label].levels, alone.levels)
        assert compressor.parts[label].table_version == 1
    assert len({tuple(compressor.parts[label].levels.tolist()) for label in LABELS}) == 3
    assert compressor.parts.default.table_version == 0, "the default part had no samples"


def test_an_update_is_complete_when_all_parts_found_their_samples():
    """In all of the last eight steps that were sampled."""
    compressor = ALQ(bucket_size=100, scope="tensor", update_steps=[0])
    versions, nothing = [], {0: ((0, "b"), (1, "b")), 1: ((1, "c"),)}
    for step in (0, 1, 3, 7, 15):
        assert compressor._training.updates.due(step)
        update(compressor, step, nothing.get(step, ()))
        versions.append([compressor.parts[label].table_version for label in LABELS])
    assert versions == [[1, 0, 1], [2, 1, 2], [3, 2, 3], [4, 3, 4], [5, 4, 5]]
    assert not any(compressor._training.updates.due(step) for step in range(16, 2000))


# States -----------------------------------------------------------------------------------------

PATTERNS = {"conv*": 4, "*.bias": None}
CASES = {
    "none": {},
    "tensor": {"scope": "tensor"},
    "bits": {"parameter_bits": PATTERNS},
    "order": {"parameter_bits": dict(reversed(PATTERNS.items()))},
    "both": {"scope": "tensor", "parameter_bits": PATTERNS},
}


def fitted(**keywords) -> ALQ:
    compressor = ALQ(bucket_size=100, **keywords)
    for power, name in enumerate(("conv1.weight", "fc.weight"), 2):
        part = compressor.parts[compressor.parts.label_of(name)]
        part.fit(torch.linspace(-1, 1, 1000) ** (2 * power - 1))
    return compressor


@pytest.mark.parametrize("case", ("tensor", "bits", "both"))
def test_a_state_replaces_what_was_there(case):
    fresh, used = ALQ(bucket_size=100, **CASES[case]), fitted(**CASES[case])
    used.load_state_dict(through_disk(fresh.state_dict()))
    assert plain(used.state_dict()) == plain(fresh.state_dict())
    label = used.parts.label_of("conv1.weight")
    assert torch.equal(used.parts[label].levels, fresh.parts[label].levels)


def assert_refused(compressor: ALQ, state: dict, told: str) -> None:
    before = plain(compressor.state_dict())
    with pytest.raises(ValueError, match=told):
        compressor.load_state_dict(state)
    assert plain(compressor.state_dict()) == before


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("tensor", "none"), ("none", "tensor"), ("bits", "order"), ("both", "bits"), ("bits", "both")],
)
def test_state_of_another_partition_is_refused(ours, theirs):
    state = ALQ(bucket_size=100, **CASES[theirs]).state_dict()
    assert_refused(fitted(**CASES[ours]), state, r"state: is of scope=.* not of")


def test_states_of_other_bits_or_unknown_parts_are_refused():
    """test_malformed_states.py damages every entry."""
    for label, bits, told in (("bits=4", 5, "levels"), ("bits=7", 4, "bits=7")):
        state = ALQ(bucket_size=100, parameter_bits=PATTERNS).state_dict() | {"step": 9}
        part = state["parts"]["bits=4"] | {"table": ALQ(bits=bits).state_dict()["table"]}
        state["parts"][label] = part
        assert_refused(fitted(parameter_bits=PATTERNS), state, told)
