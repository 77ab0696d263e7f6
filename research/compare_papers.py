"""Settings of the QSGD and NUQSGD papers' experiments, which differ from the ALQ paper's."""

from __future__ import annotations

from compare_budgets import BUDGETS
from compare_methods import METHODS, Method

from hvd_adaptive import NUQSGD, QSGD

# On these tasks; the QSGD paper has a perceptron on MNIST and ResNets, the NUQSGD paper ResNets.
PAPER_TASKS = ("fc", "resnet8")


def _qsgd(bits: int, bucket_size: int) -> Method:
    """As the QSGD paper's section 5 runs it: the L-infinity norm, zero-based levels."""
    return Method(QSGD, own={"bits": bits, "norm": "linf", "bucket_size": bucket_size})


# The QSGD paper's bits and bucket sizes.
QSGD_METHODS = {
    "QSGDinf-8bit-512": _qsgd(8, 512),
    "QSGDinf-4bit-512": _qsgd(4, 512),
    "QSGDinf-4bit-8192": _qsgd(4, 8192),
    "QSGDinf-2bit-64": _qsgd(2, 64),
}
# The NUQSGD paper's methods, all zero-based, at equal bits.
NUQSGD_METHODS = {
    "NUQSGD-4bit-8192": Method(NUQSGD, own={"bits": 4, "symmetric": False, "bucket_size": 8192}),
    "QSGD-4bit-8192": Method(QSGD, own={"bits": 4, "bucket_size": 8192}),
}
NUQSGD_TRIO = (*NUQSGD_METHODS, "QSGDinf-4bit-8192")
PAPER_METHODS = QSGD_METHODS | NUQSGD_METHODS
ALL_METHODS = (
    METHODS
    | {name: method for budget in BUDGETS.values() for name, method in budget.methods.items()}
    | PAPER_METHODS
)
