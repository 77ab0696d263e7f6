"""Parcels of one group without a step, and their exchange on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_adaptive.exchange.exchange import Route
from hvd_adaptive.exchange.parcel import Parcel, RandomStream


def parcel(codec, flat: torch.Tensor, quantized: int, factor: float, **own) -> Parcel:
    """A parcel of ``flat``, whose first ``quantized`` coordinates are quantised."""
    stream = RandomStream(number=0, seed=0, step=0, group=0)
    full, layout = flat.numel() - quantized, 7
    return Parcel(
        codec, flat.dtype, quantized, full, flat.device, stream, factor, layout=layout, **own
    )


def begun(route: Route, look: Callable[[object], None] = lambda request: None) -> Route:
    """The route, whose first request is made at once; ``look`` sees all before they are sent."""

    def rest(request):
        while True:
            look(request)
            received = yield request
            try:
                request = route.send(received)
            except StopIteration as end:
                return end.value

    return rest(next(route))


def outcomes(ways: Sequence[Route]) -> list:
    """The result of each rank, or the PayloadError that ended it."""
    requests, results = [next(way) for way in ways], [None] * len(ways)
    while requests:
        received, requests = type(requests[0]).hand_over(requests), []
        for rank, way in enumerate(ways):
            try:
                requests.append(way.send(received[rank]))
            except StopIteration as end:
                results[rank] = end.value
            except ValueError as error:
                results[rank] = error
    return results
