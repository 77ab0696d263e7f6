"""Define the compression schemes; each file implements the methods of one paper.

A wrong keyword raises ValueError, which names it, its value and what is allowed.
"""

from hvd_adaptive.schemes.alq import ALQ as ALQ
from hvd_adaptive.schemes.alq import AMQ as AMQ
from hvd_adaptive.schemes.ecdq import ECDQ as ECDQ
from hvd_adaptive.schemes.eden import DRIVE as DRIVE
from hvd_adaptive.schemes.eden import EDEN as EDEN
from hvd_adaptive.schemes.natural import NaturalCompression as NaturalCompression
from hvd_adaptive.schemes.nuqsgd import NUQSGD as NUQSGD
from hvd_adaptive.schemes.onebit import OneBitSGD as OneBitSGD
from hvd_adaptive.schemes.orq import ORQ as ORQ
from hvd_adaptive.schemes.orq import BinGrad as BinGrad
from hvd_adaptive.schemes.orq import LinearQuantile as LinearQuantile
from hvd_adaptive.schemes.orq import SignSGD as SignSGD
from hvd_adaptive.schemes.qcs import QCS as QCS
from hvd_adaptive.schemes.qsgd import QSGD as QSGD
from hvd_adaptive.schemes.sparse import SparseSGD as SparseSGD
from hvd_adaptive.schemes.terngrad import TernGrad as TernGrad
