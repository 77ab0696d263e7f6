"""A rank dies, or stops for a while: nobody hangs, and nobody goes on with wrong parameters."""

from __future__ import annotations

import signal
import time

import accidents
import pytest

# More than the sum of what each job may take.
pytestmark = [pytest.mark.parallel, pytest.mark.timeout(900)]
RANKS, PATIENT = 2, 30


def plan(*blows: dict, rank: int = 1) -> dict:
    return {"scheme": "alq", "rank": rank, "blows": blows}


def test_a_rank_pauses_continues_and_is_killed_under_mpirun():
    """Longer than any cycle of Horovod, in the second fit; killed in the fourth."""
    fits = (
        accidents.blow("level fit", signal, count=count)
        for signal, count in (("SIGSTOP", 1), ("SIGKILL", 3))
    )
    job = accidents.pause("mpi", RANKS, plan(*fits), waited, signal.SIGCONT, PATIENT)
    assert len(job.found("struck")) == 2 and not job.found("done")
    # Fits are those of steps 0, 3, 6 and 9: the rank went on for six steps after its pause.
    assert len([line for line in job.logs[1] if "step" in line]) == 9
    assert any(process.returncode for process in job.processes)
    assert set(job.found("error")) <= {"HorovodInternalError"}


def waited(job: accidents.Job) -> bool:
    """Far shorter than Gloo's time-out."""
    return time.time() > job.found("struck")[0] + 2


def test_a_rank_pauses_and_continues_over_gloo():
    stop = accidents.blow("second stage", "SIGSTOP", count=12)
    job = accidents.pause("alone", RANKS, plan(stop), waited, signal.SIGCONT, PATIENT)
    assert len(job.found("done")) == RANKS


def test_gloo_does_not_wait_for_ever():
    """Its time-out (HOROVOD_GLOO_TIMEOUT_SECONDS) ends a rank whose fellow never continues."""
    stop = accidents.blow("exchange", "SIGSTOP", count=9)
    job = accidents.pause(
        "alone", RANKS, plan(stop), lambda job: job.found("error"), signal.SIGKILL, 5
    )
    assert job.found("error") == ["HorovodInternalError"]
    assert not job.found("done")


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_ranks_are_killed_at_random_points():
    """In every phase, under every launcher, and without one: nobody ends the survivors but
    themselves."""
    accidents.main(["--times", "50"])
