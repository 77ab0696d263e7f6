"""Find the exchange that ``exchange=`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_adaptive.exchange.allgather import AllgatherExchange
from hvd_adaptive.exchange.auto import AutoExchange
from hvd_adaptive.exchange.exchange import Exchange
from hvd_adaptive.exchange.hierarchical import HierarchicalExchange
from hvd_adaptive.exchange.scatter_reduce import ScatterReduceExchange

if TYPE_CHECKING:
    from hvd_adaptive.settings import Settings

# Most ranks that use allgather by default. A rank sends (ranks - 1) payloads in an allgather, and
# about two payloads in a scatter-reduce, whatever the number of ranks.
FEW_RANKS = 3

EXCHANGES: dict[str, type[Exchange]] = {
    "allgather": AllgatherExchange,
    "scatter_reduce": ScatterReduceExchange,
    "hierarchical": HierarchicalExchange,
    "auto": AutoExchange,
}


def name_of_exchange(settings: Settings, ranks: int) -> str:
    """Return the exchange of these settings over ``ranks`` ranks.

    Without ``exchange=`` nothing is measured, so runs can be repeated.
    """
    return settings.exchange_name or ("allgather" if ranks <= FEW_RANKS else "scatter_reduce")
