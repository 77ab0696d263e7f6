"""Define the compression schemes; each file implements one published method."""

from hvd_adaptive.schemes.alq import ALQ
from hvd_adaptive.schemes.amq import AMQ
from hvd_adaptive.schemes.bingrad import BinGrad
from hvd_adaptive.schemes.ecdq import ECDQ
from hvd_adaptive.schemes.eden import DRIVE, EDEN
from hvd_adaptive.schemes.linear_quantile import LinearQuantile
from hvd_adaptive.schemes.natural import NaturalCompression
from hvd_adaptive.schemes.nuqsgd import NUQSGD
from hvd_adaptive.schemes.onebit import OneBitSGD
from hvd_adaptive.schemes.orq import ORQ
from hvd_adaptive.schemes.qcs import QCS
from hvd_adaptive.schemes.qsgd import QSGD
from hvd_adaptive.schemes.signsgd import SignSGD
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
