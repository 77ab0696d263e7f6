"""Simulate M ranks in one process, as in the papers' experiments, without Horovod or MPI.

``train`` runs data-parallel training whose gradients pass through the real codec.
``variance_on_trajectory`` measures every scheme's variance on the same full-precision trajectory.
"""

from hvd_adaptive.simulate.data import Minibatches
from hvd_adaptive.simulate.ranks import Ranks, Variance
from hvd_adaptive.simulate.records import Records
from hvd_adaptive.simulate.training import Result, evaluate, train
from hvd_adaptive.simulate.trajectory import variance_on_trajectory
from hvd_adaptive.simulate.variance import QuantizationError, Scatter, quantization_error, scatter

__all__ = [
    "Minibatches",
    "QuantizationError",
    "Ranks",
    "Records",
    "Result",
    "Scatter",
    "Variance",
    "evaluate",
    "quantization_error",
    "scatter",
    "train",
    "variance_on_trajectory",
]
