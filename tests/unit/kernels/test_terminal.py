"""What kernels write to a terminal: nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch, hvd_adaptive
compressor = hvd_adaptive.ALQ(bits=3)
compressor.decode(compressor.encode(torch.ones(5000)))
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX's")
def test_no_colour_escapes():
    """Ranks under mpirun have pseudo-terminals, too, and their output goes to log files."""
    ours, theirs = os.openpty()
    try:
        subprocess.run([sys.executable, "-c", PROGRAM], stdout=theirs, check=True)
        assert os.read(ours, 1000).split() == [b"done"]
    finally:
        os.close(ours)
        os.close(theirs)
