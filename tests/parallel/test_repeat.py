"""The same seed and number of ranks give the same bits in another launch, and over MPI and Gloo."""

from __future__ import annotations

import re
import sys

import pytest
from launch import ROOT, Launcher, run

SECONDS = 60


def trained(kind: str, ranks: int) -> str:
    """Hash of the parameters after a short training."""
    program = str(ROOT / "tests/parallel/ranks/repeat.py")
    done = run(Launcher(ranks, kind), [sys.executable, program], SECONDS)
    assert done.returncode == 0, done.stdout
    hashes = re.findall(r"hash=([0-9a-f]{64})", done.stdout)
    assert len(hashes) == 1, done.stdout
    return hashes[0]


@pytest.mark.parallel
@pytest.mark.timeout(3 * SECONDS)
def test_launches_repeat_bit_for_bit() -> None:
    """Sums in rank order depend neither on the launch nor on what carries them: stock allreduce
    differs from run to run at 3 and 4 ranks."""
    assert trained("mpirun", 4) == trained("gloo", 4)


@pytest.mark.parallel
def test_a_hang_is_killed() -> None:
    """The launcher's own time limit ends ranks that would wait for ever."""
    wait = "import horovod.torch as h; h.init(); h.rank() or h.barrier()"
    forever = f"{wait}; import time; time.sleep(600)"
    with pytest.raises(TimeoutError):
        run(Launcher(2, "mpirun"), [sys.executable, "-c", forever], 8)
