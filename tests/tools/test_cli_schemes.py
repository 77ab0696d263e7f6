"""`hvd-adaptive schemes`, against what is known of the schemes by other ways."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from exact_errors import relative_error

import hvd_adaptive
from hvd_adaptive.tools.cli import main
from hvd_adaptive.tools.schemes import catalog

SCALE = 32 / 8192  # bits of a bucket's scale, for each coordinate
# What the papers' definitions give: bits of a coordinate, and whether the mean is right.
KNOWN = {
    "ALQ": (31 / 11 + SCALE, True),
    "TernGrad": (1.6 + SCALE, False),  # clipped
    "SignSGD": (1 + SCALE, False),
    "OneBitSGD": (1 + 2 * SCALE, False),
    "NaturalCompression": (9, True),
    "SparseSGD": (None, True),
}


@pytest.fixture(scope="module")
def entries():
    return {name: catalog.entry(name) for name in KNOWN}


def test_bits_and_bias(entries):
    for name, (bits, unbiased) in KNOWN.items():
        assert bits is None or entries[name]["bits"] == pytest.approx(bits, abs=3e-3)
        assert entries[name]["unbiased"] is unbiased


def test_errors(entries):
    # Signs times the mean of |v|: 1 - (E|v|)²/E v², exactly.
    assert entries["SignSGD"]["relative_error"] == pytest.approx(1 - 2 / math.pi, rel=0.01)
    assert entries["SignSGD"]["laplacian_error"] == pytest.approx(1 / 2, rel=0.02)
    alq, normal = hvd_adaptive.ALQ(), np.random.default_rng(7).standard_normal(32 * 8192)
    alq.fit(torch.from_numpy(normal).float())
    exact = relative_error(normal, alq.levels, 8192, "linf")
    assert entries["ALQ"]["relative_error"] == pytest.approx(exact, rel=0.05)
    assert entries["NaturalCompression"]["relative_error"] < entries["NaturalCompression"]["bound"]


def test_bounds():
    qsgd = hvd_adaptive.QSGD(bits=4)
    # Lemma 3.1 of the paper: min(n/s², √n/s).
    paper = min(8192 / 7**2, math.sqrt(8192) / 7)
    assert catalog.bound(qsgd) <= paper * (1 + 1e-9) and catalog.bound(qsgd) > 0.5 * paper
    assert catalog.bound(hvd_adaptive.ECDQ(relative_variance=0.1)) == pytest.approx(0.1)
    assert catalog.bound(hvd_adaptive.QCS(gain=10, bucket_size=512)) > 0.05
    assert catalog.bound(hvd_adaptive.SignSGD()) is None
    assert catalog.bound(hvd_adaptive.TernGrad()) is None


def test_bias_is_noticed():
    assert not catalog.is_unbiased(hvd_adaptive.QCS(estimator="mmse", bucket_size=512, gain=10))
    assert not catalog.is_unbiased(hvd_adaptive.BinGrad(variant="biased"))
    assert catalog.is_unbiased(hvd_adaptive.QSGD(bits=2))
    assert catalog.is_unbiased(hvd_adaptive.TernGrad(clip=None))


def test_some_are_measured(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["schemes", "signsgd", "ALQ", "--json"]) == 0
    unmeasured = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in unmeasured] == ["SignSGD", "ALQ"]
    assert "bound" not in unmeasured[0]
    assert main(["schemes", "signsgd", "ALQ", "--json", "--measure"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], second["name"]) == ("SignSGD", "ALQ")
    assert second["keywords"]["bits"] == "3" and "Faghri" in second["method"]
    assert first["bound"] is None
    assert main(["schemes", "SignSGD", "TernGrad", "--measure"]) == 0
    out = capsys.readouterr().out
    assert "SignSGD" in out and "1.61" in out and "unbiased" in out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    with pytest.raises(SystemExit) as ended:
        main(["schemes", "ALG"])
    assert ended.value.code == 2 and "must be one of ALQ" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 120])
def test_lists_and_descriptions_fit(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["schemes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in catalog.scheme_classes())
    assert main(["schemes", "TernGrad"]) == 0
    described = capsys.readouterr().out
    for text in ("TernGrad(clip=2.5", "Wen et al. 2017", "deviations", "error_feedback:"):
        assert text in described, text
    assert max(map(len, [*listed.splitlines(), *described.splitlines()])) <= width


def test_first_sentences():
    told = {name: catalog.outline(name)["method"] for name in catalog.scheme_classes()}
    assert told["QSGD"].endswith("2017, Eq. 4, Lemma 3.1)")
    assert told["TernGrad"].startswith("Ternary gradients (Wen et al. 2017")
    assert all(len(sentence) > 20 for sentence in told.values())
    assert all(re.search(r"\b(19|20)\d\d\b", sentence) for sentence in told.values())
    for name in ("ORQ", "BinGrad", "SignSGD", "LinearQuantile"):
        assert re.search("Xu, Huo, Huang.*2020", told[name])
