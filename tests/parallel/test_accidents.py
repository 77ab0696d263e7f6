"""A rank dies, or stops for a while: nobody hangs, and nobody goes on with wrong parameters."""

from __future__ import annotations

import signal
import time

import accidents
import pytest

# More than the sum of what each job may take.
pytestmark = [pytest.mark.parallel, pytest.mark.timeout(360)]
RANKS = 2


def plan(phase: str, count: int, rank: int = 1) -> dict:
    return {"scheme": "alq", "phase": phase, "count": count, "rank": rank}


@pytest.mark.parametrize(
    ("kind", "blow", "survivors"),
    [
        ("mpirun", plan("level fit", 1), "launcher"),
        ("gloo", plan("backward", 5), None),
        ("alone", plan("second stage", 12, rank=0), "HorovodInternalError"),
    ],
    ids=["fit", "backward", "second_stage"],
)
def test_a_rank_is_killed(kind, blow, survivors):
    end, _ = accidents.kill(kind, RANKS, blow)
    assert end in ({survivors} if survivors else {"launcher", "HorovodInternalError"})


@pytest.mark.parametrize(
    ("kind", "blow"),
    [("mpirun", plan("level fit", 1)), ("alone", plan("second stage", 12))],
    ids=["mpi", "gloo"],
)
def test_a_rank_pauses_and_continues(kind, blow):
    """Longer than any cycle of Horovod, shorter than Gloo's time-out."""
    job = accidents.pause(
        kind, RANKS, blow, lambda job: time.time() > job.found("struck")[0] + 2, signal.SIGCONT
    )
    assert len(job.found("done")) == RANKS


def test_gloo_does_not_wait_for_ever():
    """Its time-out (HOROVOD_GLOO_TIMEOUT_SECONDS) ends a rank whose fellow never continues."""
    job = accidents.pause(
        "alone", RANKS, plan("exchange", 9), lambda job: job.found("error"), signal.SIGKILL
    )
    assert job.found("error") == ["HorovodInternalError"]
    assert not job.found("done")
