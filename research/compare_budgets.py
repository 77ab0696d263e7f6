"""Methods of compare.py at equal wire bits a coordinate, by budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from compare_methods import PAPER, Method

from hvd_adaptive import (
    ALQ,
    ECDQ,
    EDEN,
    ORQ,
    QCS,
    QSGD,
    BinGrad,
    LinearQuantile,
    NaturalCompression,
    OneBitSGD,
    SignSGD,
    SparseSGD,
)
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.schemes.qcs import best_projection, variance_bound
from hvd_adaptive.settings import Settings


@dataclass(frozen=True)
class Budget:
    """title: what travels for a quantised coordinate. methods: by name, made for this budget.
    beside: of METHODS, at the bits of compare.py's flags, told in the same table."""

    title: str
    methods: Mapping[str, Method]
    beside: tuple[str, ...] = ()


def _own(make: type[GradientCompressor], rate: float = 1.0, **keywords: Any) -> Method:
    return Method(make, own=keywords, rate=rate)


def _qcs_gamma(gain: float) -> float:
    """γ of the page's bucket size."""
    order = Settings().bucket_size
    return variance_bound(order, *best_projection(order, gain))


def _levels(count: int) -> dict[str, Method]:
    """The ORQ paper's methods with as many levels."""
    return {
        f"ORQ-{count}": _own(ORQ, levels=count),
        f"Linear-{count}": _own(LinearQuantile, levels=count),
        f"QSGDinf-{count}": _own(QSGD, intervals=(count - 1) // 2, norm="linf"),
    }


def _sparse(lenet: float, fc: float, resnet8: float) -> Method:
    """Densities at which payloads are of the budget's size, within 3 %, in seed 0's runs."""
    return _own(SparseSGD, density={"lenet": lenet, "fc": fc, "resnet8": resnet8})


# One line makes a method: its class and keywords. QCS-g is QCS at gain g.
BUDGETS = {
    "1": Budget(
        "1 bit",
        {
            "SignSGD": _own(SignSGD),
            "SignSGD-EF": _own(SignSGD, error_feedback=1.0),
            "BinGrad-pb": _own(BinGrad, variant="partially_biased"),
            "BinGrad-b": _own(BinGrad, variant="biased"),
            "OneBitSGD": _own(OneBitSGD),
            "QCS-32": _own(QCS, gain=32),
            "QCS-32-EF": _own(QCS, gain=32, error_feedback=round(1 / (1 + _qcs_gamma(32)), 3)),
            "QCS-32-MMSE": _own(QCS, gain=32, estimator="mmse"),
            "QCS-32-MMSE-EF": _own(QCS, gain=32, estimator="mmse", error_feedback=1.0),
            "QCS-32-MMSE-rate": _own(QCS, 1 + _qcs_gamma(32), gain=32, estimator="mmse"),
            "SparseSGD-1": _sparse(0.114, 0.107, 0.136),
            "ECDQ-1": _own(ECDQ, bits=1.0),
            "EDEN-1": _own(EDEN, bits=1),
        },
    ),
    "1.6": Budget(
        "1.6 bits: three levels",
        _levels(3)
        | {
            "ORQ-3-clip": _own(ORQ, levels=3, clip=2.5),
            "QCS-20": _own(QCS, gain=20),
            "ECDQ-1.6": _own(ECDQ, bits=1.6),
        },
        ("TernGrad",),
    ),
    "2.3": Budget(
        "2.3 bits: five levels",
        _levels(5)
        | {
            "QCS-13.7": _own(QCS, gain=13.7),
            "ECDQ-2.3": _own(ECDQ, bits=2.33),
        },
    ),
    "3.2": Budget(
        "3.2 bits: nine levels",
        _levels(9)
        | {
            "QCS-10": _own(QCS, gain=10),
            "ECDQ-3.2": _own(ECDQ, bits=3.2),
            "EDEN-3": _own(EDEN, bits=3),
        },
        ("QSGD", "QSGDinf", "ALQ", "AMQ"),
    ),
    "8": Budget(
        "8 bits, 9 for natural compression",
        {
            "NaturalCompression": _own(NaturalCompression),
            "ALQ-8bit": Method(partial(ALQ, **PAPER), adaptive=True, own={"bits": 8}),
            "QCS-4": _own(QCS, gain=4),
            "ECDQ-8": _own(ECDQ, bits=8.0),
        },
    ),
}
