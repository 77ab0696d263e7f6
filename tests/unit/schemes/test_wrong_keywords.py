"""Wrong keywords of schemes: each its own error that names keyword, value and what is allowed."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from hvd_adaptive import (
    ALQ,
    AMQ,
    DRIVE,
    ECDQ,
    EDEN,
    NUQSGD,
    ORQ,
    QCS,
    QSGD,
    BinGrad,
    LinearQuantile,
    OneBitSGD,
    ScatterReduce,
    SignSGD,
    SparseSGD,
    TernGrad,
    Tuning,
)

NAN, INF = float("nan"), float("inf")
CLIP = (0, -1.0, NAN, INF, "2", True), "must be a number above 0, or None"
# scheme, keyword, wrong values, what the message says that is allowed.
WRONG = [
    (ALQ, "bits", (1, 9, 0, -3, 3.0, True, "3", None, 10**30, [3]), "from 2 to 8"),
    (
        ALQ,
        "bucket_size",
        (100.5, 0, -1, 8192.0, True, "8192", None, 2**64, Fraction(9), np.float32(9)),
        ">= 1|from 1 to",
    ),
    (ALQ, "norm", ("l1", "L2", 2, None, True, ["l2"]), "'l2', 'linf'"),
    (ALQ, "solver", ("cd", None, 0, "", ["x"]), "'coordinate_descent'"),
    (ALQ, "statistics", ("moments", None, 1, ["x"]), "'histogram', 'normal'"),
    (ALQ, "normalized", (1, None, "yes"), "True or False"),
    (ALQ, "symmetric", (0, None, "no"), "True or False"),
    (ALQ, "samples", (0, -1, 2.5, True, None), ">= 1"),
    (ALQ, "seed", (-1, 0.5, None, True, 2**64), "0 to"),
    (ALQ, "min_numel", (-1, 1.5, None), ">= 0"),
    (ALQ, "tail", ("drop", None, True, ["x"]), "'quantize', 'full'"),
    (ALQ, "coding", ("zip", None), "'fixed'"),
    (ALQ, "exchange", ("ring", 3, Tuning(), ScatterReduce, {"auto": {}}), "'allgather'"),
    (
        ALQ,
        "error_feedback",
        ("yes", 0, -0.5, 1.5, NAN, INF, True, [1.0]),
        "above 0 and at most 1, 'auto', or None",
    ),
    (ALQ, "fusion_bytes", (0, 1.5, None), ">= "),
    (ALQ, "tuning", (None, True, {"worker": False}, "fast"), "a Tuning, such as"),
    (ALQ, "warmup_steps", (-1, 0.5, None), ">= 0"),
    (ALQ, "update_steps", (5, "often", b"ab", 2.5), "ascending steps|callable"),
    (ALQ, "update_steps", ([-1], [0.5], ["a"], [True], [None]), "ascending steps"),
    *((kind, "clip", *CLIP) for kind in (ALQ, QSGD, TernGrad, SignSGD)),
    (Tuning, "checksum", (0, 1, None, "yes"), "must be True or False"),
    (SignSGD, "keep_zeros", (0, 1, None, "yes"), "must be True or False"),
    (QSGD, "bits", (1,), "must be an integer from 2 to 8"),
    (QSGD, "intervals", (0,), "must be an integer from 1 to 127"),
    (QSGD, "norm", ("l1",), "'l2', 'linf'"),
    (NUQSGD, "multiplier", (1.0, NAN), "must be a number"),
    (AMQ, "bits", (9,), "from 2 to 8"),
    (AMQ, "statistics", ("none",), "'histogram', 'normal'"),
    (ORQ, "levels", (4, True, 257), "must be one of 3, 5, 9, 17, 33, 65, 129"),
    (ORQ, "solver", ("exact",), "must be one of 'greedy', 'coordinate_desc"),
    (ORQ, "level_dtype", ("bfloat16",), "must be one of 'float32'"),
    (LinearQuantile, "levels", (1,), "must be an integer from 2 to 256"),
    (BinGrad, "variant", ("unbiased",), "must be one of 'partially_b"),
    (BinGrad, "iterate", (True,), "must be False unless variant='biased'"),
    (OneBitSGD, "error_feedback", ("on",), "above 0 and at most 1"),
    (
        SparseSGD,
        "density",
        (0, -0.1, 1.01, NAN, INF, True, "0.1", None, 1e-320, 2**-25 / 8192),
        "must be a number above 2..-25 / bucket_size = 3.64e-12 and at most 1",
    ),
    (ECDQ, "bits", (0.4, 11, -1, True, "2", NAN), "0.5 to 10"),
    (ECDQ, "relative_variance", (0, 21, "x"), "2e-06 to 20"),
    (EDEN, "bits", (0, 9, 1.5, 0.3, "2", True, None), ""),
    (EDEN, "bucket_size", (1, 32, 96, 5000, 1 << 17), ""),
    (QCS, "estimator", ("biased",), "must be one of 'unbiased', 'mmse'"),
    (QCS, "gain", (3.9, 7944, NAN, "21", True), "must be a number from 4 to 7943.76"),
    (QCS, "quantizer_range", (0, 1.5, 128, True, "1"), "0.5 or an integer from 1 to 127"),
    (QCS, "bucket_size", (97, 2**25), "must be a power of two .*96, 100, 192, 200, 288"),
]


@pytest.mark.parametrize(("kind", "keyword", "values", "allowed"), WRONG)
def test_the_message_names_keyword_value_and_what_is_allowed(kind, keyword, values, allowed):
    for value in values:
        with pytest.raises(ValueError) as caught:
            kind(**{keyword: value})
        message = str(caught.value)
        shown = value[0] if isinstance(value, list) and keyword == "update_steps" else value
        assert keyword in message and repr(shown) in message, message
        assert re.search(allowed, message), message


# What is wrong of several keywords together.
TOGETHER = [
    (QSGD, {"bits": 3, "intervals": 3}, "intervals=3: cannot be given together"),
    (NUQSGD, {"bits": 8, "multiplier": 0.3}, "multiplier=0.3"),
    (BinGrad, {"variant": "biased", "iterate": 1}, "iterate=1: must be True or False"),
    (SignSGD, {"parameter_bits": {"*": 4}}, "SignSGD.. has no keyword 'bits'"),
    (DRIVE, {"parameter_bits": {"*": 4}}, "parameter_bits"),
    (EDEN, {"bits": 0.125, "bucket_size": 256}, "bucket_size=256: must be at least 512 with"),
    (SparseSGD, {}, "density=None: must be a number above .* and at most 1"),
    (ECDQ, {}, "give one of them"),
    (ECDQ, {"bits": 2.0, "relative_variance": 0.1}, "give one of them"),
    (ECDQ, {"bits": 0.5, "bucket_size": 64}, "bucket_size=64"),
    (ECDQ, {"bits": 2.0, "coding": "huffman"}, "coding="),
    (ECDQ, {"bits": 2.0, "coding": "elias"}, "coding="),
    (ECDQ, {"bits": 2.0, "statistics": "normal"}, "statistics="),
    (ECDQ, {"bits": 2.0, "samples": 0}, "samples="),
    (ECDQ, {"bits": 2.0, "update_steps": 5}, "update_steps="),
    (ECDQ, {"bits": 2.0, "parameter_bits": {"a": 11}}, "parameter_bits="),
    (ECDQ, {"relative_variance": 0.1, "parameter_bits": {"a": 2}}, "parameter_bits=.*give one"),
    (QCS, {"gain": 4, "bucket_size": 2}, "gain=4: must be a number"),
    (QCS, {"gain": 21, "measurements": 5}, "gain=21: cannot be given together"),
    (QCS, {"gain": 21, "quantizer_range": 1}, "gain=21: cannot be given together"),
    (QCS, {"measurements": 0, "quantizer_range": 1}, "measurements=0: must be an integer from 1"),
    (QCS, {"measurements": 8193, "quantizer_range": 1}, "measurements=8193"),
    (QCS, {"measurements": 2.5, "quantizer_range": 1}, "measurements=2.5"),
    (QCS, {"measurements": 100}, "quantizer_range=None: must be 0.5 or an integer from 1 to 127"),
    (QCS, {"parameter_bits": {"*": 4}}, "parameter_bits="),
    *(
        (kind, {"symmetric": True, "coding": "elias"}, "coding='elias': .*symmetric=False")
        for kind in (ALQ, AMQ, QSGD, NUQSGD)
    ),
    *(
        (ALQ, {"update_steps": steps}, "update_steps")
        for steps in ([0, 100, 2.5], [5, "a"], {0, None}, [0, 100, -1], (0, 10, True))
    ),
    *(
        (ALQ, {"named_parameters": wrong}, "named_parameters")
        for wrong in ([torch.nn.Parameter(torch.zeros(3))], [("a",)], [(1, torch.zeros(3))])
    ),
]


@pytest.mark.parametrize(("kind", "keywords", "message"), TOGETHER)
def test_keywords_that_do_not_fit_together(kind, keywords, message):
    with pytest.raises(ValueError, match=message):
        kind(**keywords)


def test_a_scheme_without_tables_has_no_other_keyword_for_fits():
    with pytest.raises(TypeError, match=r"^EDEN\(\) has no keyword 'update_steps'; EDEN's own"):
        EDEN(update_steps=[1])
