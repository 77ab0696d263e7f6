"""Trainings over other means than those of the rank checks' launches, whose bits are a simulation's
as theirs are (run by tests/parallel/test_resume.py)."""

from __future__ import annotations

import horovod.torch as hvd
from check_simulation import CASES, compare
from training import begin

if __name__ == "__main__":
    begin()
    # Tables and residuals; plain numbers, codes, a second stage, a rotation.
    for case in ("small groups", "terngrad", "nuqsgd-4-huffman", "scatter", "eden"):
        compare(CASES[case])
    print(f"all cases: the same bits on {hvd.size()} ranks", flush=True)
