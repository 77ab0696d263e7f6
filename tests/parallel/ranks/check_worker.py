"""When groups leave, with a worker and without. (Bits are the same: check_simulation.py on real
ranks, tests/unit/hooks/horovod/test_any_order.py whatever the schedule.)"""

from __future__ import annotations

import torch
from training import distributed, train, trained, wait_for

from hvd_adaptive import ALQ, Tuning

SMALL = {"bucket_size": 128, "min_numel": 10, "fusion_bytes": 2048}


def test_groups_leave_while_the_backward_pass_goes_on():
    """The last hook finds averages of earlier groups decoded already."""
    compressor = ALQ(tuning=Tuning(worker=True), update_steps=(0,), **SMALL)
    decoded = []
    model, optimizer = trained(compressor, 1)

    def wait(gradient: torch.Tensor) -> None:
        step = compressor._training.connection.drive.step
        wait_for(lambda: step._returned)
        decoded.append(len(step._returned))

    next(iter(model.parameters())).register_hook(wait)
    train(model, optimizer, 1)
    assert decoded[0] >= 1


def test_groups_are_launched_in_hooks_without_a_worker():
    """The agreement costs no overlap beyond the first gradient."""
    weights = [torch.nn.Parameter(torch.zeros(2000)) for _ in range(3)]
    compressor = ALQ(
        update_steps=[], bucket_size=100, fusion_bytes=8000, tuning=Tuning(worker=False)
    )
    optimizer = distributed({f"roll.{i}": w for i, w in enumerate(weights)}, compressor)
    weights[2].sum().backward()
    drive = compressor._training.connection.drive
    wait_for(lambda: drive.read.active)  # on a worker thread, as ranks agree for the first time
    step = drive.step
    weights[1].sum().backward()
    assert len(step._flying) == 2
    weights[0].sum().backward()
    assert len(step._flying) == len(step.layout.groups)
    optimizer.step()
