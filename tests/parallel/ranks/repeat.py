"""Trainings over other means than those of the rank checks' launches, whose bits are a simulation's
as theirs are (run by tests/parallel/test_repeat.py)."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from check_simulation import CASES, test_simulation_equals_horovod


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    for construct in CASES.values():
        test_simulation_equals_horovod(construct)
    print(f"all cases: the same bits on {hvd.size()} ranks", flush=True)


if __name__ == "__main__":
    main()
