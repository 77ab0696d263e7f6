"""Trainings over other means than those of the rank checks' launches, whose bits are a simulation's
as theirs are (run by tests/parallel/test_repeat.py)."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from check_simulation import CASES, compare
from conftest import rest_while_waiting

# Tables and residuals; plain numbers, codes, a second stage, a rotation.
REPEATED = ("alq-small-groups", "terngrad", "nuqsgd", "scatter-alq", "eden")


def main() -> None:
    hvd.init()
    rest_while_waiting()
    torch.set_num_threads(1)
    for case in REPEATED:
        compare(CASES[case])
    print(f"all cases: the same bits on {hvd.size()} ranks", flush=True)


if __name__ == "__main__":
    main()
