"""Run the rank tests (tests/parallel/ranks) under each launcher.

By hand: mpirun -np 2 python -m pytest -o python_files="check_*.py" tests/parallel/ranks
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from launch import LAUNCHERS, Launched, Launcher, start

# A check that hangs is ended in its rank, with every thread's stack, and with it the launch; the
# launch's own limit is for what hangs outside of checks.
CHECK_SECONDS, SECONDS = 180, 900


def started(launcher: Launcher) -> Launched:
    """All checks, on their way."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
        "-o", "python_files=check_*.py", "-o", f"timeout={CHECK_SECONDS}",
        "-o", "timeout_method=thread", "tests/parallel/ranks",
    ]  # fmt: skip
    return start(launcher, command, SECONDS)


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest) -> Iterator[dict[Launcher, Launched]]:
    """Launches of two ranks, those that were asked for, at once: each waits half of its time."""
    asked = [item.callspec.params["launcher"] for item in request.session.items
             if item.path == request.path and item.originalname == "test_ranks"]  # fmt: skip
    launches = {launcher: started(launcher) for launcher in asked if launcher.ranks == 2}
    yield launches
    for launched in launches.values():
        launched.kill()


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_ranks(launcher: Launcher, pairs: dict[Launcher, Launched]) -> None:
    """Every check passes on every rank; a hang is killed and fails."""
    done = (pairs.get(launcher) or started(launcher)).end()
    assert done.returncode == 0, done.stdout
    # Every rank must have run to its end, not only the last one to print.
    assert done.stdout.count(" passed") == launcher.ranks, done.stdout
    assert " failed" not in done.stdout, done.stdout
