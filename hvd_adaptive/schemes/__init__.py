"""Define the compression schemes; each file implements the methods of one paper.

A wrong keyword raises ValueError, which names it, its value and what is allowed.
"""

from hvd_adaptive.schemes.alq import ALQ, AMQ
from hvd_adaptive.schemes.ecdq import ECDQ
from hvd_adaptive.schemes.eden import DRIVE, EDEN
from hvd_adaptive.schemes.natural import NaturalCompression
from hvd_adaptive.schemes.nuqsgd import NUQSGD
from hvd_adaptive.schemes.onebit import OneBitSGD
from hvd_adaptive.schemes.orq import ORQ, BinGrad, LinearQuantile, SignSGD
from hvd_adaptive.schemes.qcs import QCS
from hvd_adaptive.schemes.qsgd import QSGD
from hvd_adaptive.schemes.sparse import SparseSGD
from hvd_adaptive.schemes.terngrad import TernGrad

__all__ = [
    "ALQ",
    "AMQ",
    "DRIVE",
    "ECDQ",
    "EDEN",
    "NUQSGD",
    "ORQ",
    "QCS",
    "QSGD",
    "BinGrad",
    "LinearQuantile",
    "NaturalCompression",
    "OneBitSGD",
    "SignSGD",
    "SparseSGD",
    "TernGrad",
]
