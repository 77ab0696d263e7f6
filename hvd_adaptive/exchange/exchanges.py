"""The exchanges by name: what ``exchange=`` says."""

from __future__ import annotations

from hvd_adaptive.exchange.allgather import Allgather
from hvd_adaptive.exchange.auto import Auto
from hvd_adaptive.exchange.exchange import Exchange
from hvd_adaptive.exchange.hierarchical import Hierarchical
from hvd_adaptive.exchange.scatter_reduce import ScatterReduce

EXCHANGES: dict[str, type[Exchange]] = {
    "allgather": Allgather,
    "scatter_reduce": ScatterReduce,
    "hierarchical": Hierarchical,
    "auto": Auto,
}
