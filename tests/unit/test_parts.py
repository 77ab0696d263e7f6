"""Parts: which parameter belongs to which, and that each has a codec of its own."""

from __future__ import annotations

import inspect
import logging

import numpy as np
import pytest
import torch

from hvd_adaptive import ALQ, AMQ, NUQSGD, QSGD, PayloadError, TernGrad, Tuning
from hvd_adaptive.adapt.joint_update import JointUpdate
from hvd_adaptive.coding.payload import read_header

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


class TestLabels:
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
        ids=["one", "network", "tensor"],
    )
    def test_which_parameter_is_in_which(self, keywords, labels, bits):
        parts = ALQ(**keywords).parts
        assert "scope" in keywords or list(parts) == list(bits)
        assert [parts.label_of(name) for name in NAMES] == labels
        assert [parts[label].table.bits for label in bits] == list(bits.values())
        assert list(parts) == list(bits) and parts[""] is parts.default

    def test_patterns_match_whole_names_and_their_case(self):
        compressor = QSGD(parameter_bits={"conv*": 4, "Fc.weight": 5, "x[12]": 6})
        names = ("layer.conv", "conv", "fc.weight", "Fc.weight.x", "Fc.weight", "x1", "x3")
        labels = [compressor.parts.label_of(name) for name in names]
        assert labels == ["", "bits=4", "", "", "bits=5", "bits=6", ""]

    def test_unknown_parts(self):
        with pytest.raises(ValueError, match=r"'bits=4'.*must be one of '', 'bits=5'"):
            ALQ(parameter_bits={"a": 5}).parts["bits=4"]
        with pytest.raises(ValueError, match=r"'fc'.*must be one of ''"):
            ALQ().parts["fc"]
        with pytest.raises(ValueError, match=r"'fc.bias'"):
            ALQ(scope="tensor", parameter_bits=BITS).parts["fc.bias"]


class TestCodecs:
    @pytest.mark.parametrize("scheme", OWN, ids=lambda s: s.__name__)
    def test_same_keywords_but_for_bits(self, scheme):
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

    def test_steps_and_parameters_are_not_shared(self):
        """Iterables that can be read once go to the compressor alone."""
        steps = iter([0, 5, 50])
        named = ((name, torch.nn.Parameter(torch.zeros(3))) for name in ("a", "b"))
        compressor = ALQ(scope="tensor", update_steps=steps, named_parameters=named)
        assert compressor.parts["a"].settings.named_parameters is None
        assert [s for s in range(60) if compressor._training.updates.due(s)] == [0, 5, 50]
        assert len(compressor.settings.named_parameters) == 2

    def test_tables_are_independent(self):
        compressor = ALQ(scope="tensor", bucket_size=100)
        a, b = compressor.parts["a"], compressor.parts["b"]
        first = compressor.levels
        a.fit(heavy(1))
        versions = [codec.table_version for codec in (a, b, compressor.parts.default)]
        assert versions == [1, 0, 0]
        assert torch.equal(b.levels, first) and torch.equal(compressor.levels, first)
        assert not torch.equal(a.levels, first)
        assert compressor.parts["a"] is a and compressor.report()["table_version"] == 1
        payload = a.payloads.encode(heavy(1), heavy(1).numel(), 1).bytes
        with pytest.raises(PayloadError, match="table"):
            b.payloads.sum([payload], read_header(payload), 1.0)

    def test_a_first_table_is_every_tensors(self):
        table = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1]
        compressor = ALQ(table=table, scope="tensor", parameter_bits={"*.bias": None})
        assert compressor.parts["a"].levels.tolist() == table


class TestArguments:
    @pytest.mark.parametrize("value", (0, 2.5, "4", True), ids=repr)
    def test_bits_of_a_pattern(self, value):
        with pytest.raises(ValueError, match="an integer >= 1, or None") as caught:
            QSGD(parameter_bits={"a": 3, "conv*": value})
        assert f"parameter_bits['conv*']={value!r}" in str(caught.value)

    @pytest.mark.parametrize(
        ("construct", "said"),
        [
            (lambda p: ALQ(parameter_bits=p(9)), "bits=9: must be an integer from 2 to 8"),
            (lambda p: QSGD(intervals=5, parameter_bits=p(4)), "intervals=5: cannot be given"),
            (lambda p: ALQ(table=[-1, 0, 1], bits=2, parameter_bits=p(3)), "table: must"),
            (lambda p: NUQSGD(multiplier=0.1, parameter_bits=p(8)), "multiplier=0.1"),
            (lambda p: TernGrad(parameter_bits=p(4)), "no keyword 'bits'"),
        ],
        ids=["most", "intervals", "table", "multiplier", "no bits"],
    )
    @pytest.mark.parametrize("scope", ["network", "tensor"])
    def test_schemes_that_cannot_have_these_bits_refuse_them_at_once(self, construct, said, scope):
        def patterns(bits: int) -> dict[str, int]:
            return {"conv*": bits}

        with pytest.raises(ValueError, match=said) as caught:
            construct(patterns)
        assert "parameter_bits={'conv*': " in str(caught.value)

    @pytest.mark.parametrize("construct", (TernGrad, lambda **k: QSGD(intervals=5, **k)))
    def test_full_precision_needs_no_bits(self, construct):
        compressor = construct(parameter_bits={"*.bias": None})
        labels = compressor.parts.label_of("fc.bias"), compressor.parts.label_of("fc.weight")
        assert labels == (None, "")

    def test_the_mapping_is_copied(self):
        patterns = {"conv*": 4}
        compressor = ALQ(parameter_bits=patterns)
        patterns.clear()
        assert compressor.parts.label_of("conv1") == "bits=4"

    def test_fingerprints(self):
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

    def test_idle_patterns_are_told_once(self, caplog):
        compressor = ALQ(parameter_bits={"conv*": 4, "conv1*": 5, "*.bias": None, "cnov*": 6})
        with caplog.at_level(logging.WARNING, "hvd_adaptive"):
            compressor.parts.warn_of_idle_patterns(NAMES)
            compressor.load_state_dict(compressor.state_dict())
            compressor.parts.warn_of_idle_patterns(NAMES)
        assert len(caplog.messages) == 1
        assert "'conv1*' applies to no parameter: earlier patterns" in caplog.messages[0]
        assert "'cnov*' matches no parameter; close names are 'conv" in caplog.messages[0]

    @pytest.mark.parametrize(
        ("pattern", "close"),
        [
            ("Conv*", "close names are 'conv1.weight', 'conv2.weight'"),
            ("onv2.weigh", "close names are 'conv2.weight'"),
            ("zzz*", "names are 'conv1.weight'"),
        ],
    )
    def test_close_names_are_listed(self, pattern, close, caplog):
        with caplog.at_level(logging.WARNING, "hvd_adaptive"):
            ALQ(parameter_bits={pattern: 4}).parts.warn_of_idle_patterns(NAMES)
        assert f"{pattern!r} matches no parameter; {close}" in caplog.messages[0]


class TestUpdates:
    """Buckets of two ranks: what one update of all parts does, each part would do alone."""

    LABELS = ("a", "b", "c")

    def samples(self, rank: int, empty: tuple = ()):
        def draw(count: int, part: str) -> list[torch.Tensor]:
            index = self.LABELS.index(part)
            scale = 0.0 if (rank, part) in empty else 1.0
            return list((scale * heavy(index + 3 * rank, 100 * count)).split(100))

        return draw

    def update(self, compressor: ALQ, step: int, empty: tuple = ()):
        """As two ranks do; ``vectors`` are the other's statistics."""
        codecs = {label: ALQ(bucket_size=100).parts.default for label in self.LABELS}
        draw = self.samples(1, empty)
        own = {label: codec.collect(draw(20, label)) for label, codec in codecs.items()}
        other = JointUpdate(codecs).joined(own)
        calls = []

        def sync(own, fit):
            calls.append(own)
            return fit([own, other])

        compressor._training.updates.run(step, self.samples(0, empty), sync, self.LABELS)
        assert len(calls) == 1, "one sync, however many parts"

    def test_each_part_is_fitted_to_its_own_samples(self):
        compressor = ALQ(bucket_size=100, scope="tensor", parameter_bits={"c": 5})
        self.update(compressor, 0)
        for label in self.LABELS:
            alone = ALQ(bucket_size=100, bits=5 if label == "c" else 3)
            vectors = [
                alone.parts.default.collect(self.samples(rank)(20, label)) for rank in (0, 1)
            ]
            alone.parts.default.apply_update(alone.parts.default.refit(vectors), 0)
            assert torch.equal(compressor.parts[label].levels, alone.levels)
            assert compressor.parts[label].table_version == 1
        tables = {tuple(compressor.parts[label].levels.tolist()) for label in self.LABELS}
        assert len(tables) == 3
        assert compressor.parts.default.table_version == 0, "the default part had no samples"

    def test_an_update_is_complete_when_all_parts_found_their_samples(self):
        """In all of the last eight steps that were sampled."""
        compressor = ALQ(bucket_size=100, scope="tensor", update_steps=[0])
        versions, nothing = [], {0: ((0, "b"), (1, "b")), 1: ((1, "c"),)}
        for step in (0, 1, 3, 7, 15):
            empty = nothing.get(step, ())
            assert compressor._training.updates.due(step)
            self.update(compressor, step, empty)
            versions.append([compressor.parts[label].table_version for label in self.LABELS])
        assert versions == [[1, 0, 1], [2, 1, 2], [3, 2, 3], [4, 3, 4], [5, 4, 5]]
        assert not any(compressor._training.updates.due(step) for step in range(16, 2000))
