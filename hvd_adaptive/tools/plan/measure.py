"""Measure the constants of the cost model, by two ranks on this machine (worker)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from hvd_adaptive.tools.launch import Ranks, results, start_ranks

if TYPE_CHECKING:
    from hvd_adaptive.tools.plan.model import Machine

LIMIT = 60.0  # seconds for ranks, and as many for each text; then they count as hanging


@contextlib.contextmanager
def started(texts: Sequence[str], ranks: int, launcher: str) -> Iterator[Callable[[], Machine]]:
    """Start to measure methods, as ``tools.methods`` reads them, for a job of ``ranks`` ranks.

    This imports no torch, so that the ranks import it while this process does. They exchange over
    TCP on the loopback device, which limits nothing: what is left is the time of the processor.

    Yields:
        A function that waits for what is measured. Like this one it raises RanksError.
    """
    two, limit = Ranks(2, launcher, tcp=True), LIMIT * (1 + len(texts))
    job = start_ranks("hvd_adaptive.tools.plan.worker", [list(texts), ranks], two, limit)

    def finish() -> Machine:
        from hvd_adaptive.tools.plan.model import Cost, Machine

        (found,) = results(job)
        codecs = tuple(Cost(**one) for one in found.pop("codecs"))
        return Machine(launcher, codecs=codecs, **found)

    try:
        yield finish
    finally:
        job.end()
