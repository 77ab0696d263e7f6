"""One file per published method."""

from hvd_adaptive.schemes.alq import ALQ
from hvd_adaptive.schemes.amq import AMQ
from hvd_adaptive.schemes.nuqsgd import NUQSGD
from hvd_adaptive.schemes.qsgd import QSGD
from hvd_adaptive.schemes.terngrad import TernGrad

__all__ = ["ALQ", "AMQ", "NUQSGD", "QSGD", "TernGrad"]
