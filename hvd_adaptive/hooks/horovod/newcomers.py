"""Give the first rank's state to ranks that came later.

Elastic Horovod starts workers in the middle of training. Their compressors are new, at step 0, and
those of workers that survived a crash may be a step apart. Horovod shares the model's state and, if
the elastic state holds the compressor, the compressor's. Otherwise ranks detect here that they
differ in the step alone.

A rank adopts the first rank's state if its own is at step 0, or of an earlier generation of
Horovod. It also does so if it has another table at the same step, and an attempt at the step was
given up while tables were fitted. Any other difference is an error of the program: a rank made one
more step, or loaded another checkpoint. Residuals belong to each rank: newcomers have none, and the
other ranks keep theirs.
"""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.hooks.horovod.agreement import tables_fitted
from hvd_adaptive.hooks.horovod.elastic import with_own, without_own

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.transport.horovod_world import HorovodWorld

logger = logging.getLogger("hvd_adaptive")


def take_first_state(
    world: HorovodWorld, compressor: GradientCompressor, name: str, attempt: int, survives: bool
) -> bool:
    """Give ranks that differ in the step alone the same state. This is a collective.

    No rank may have sent anything of the step. Returns False, on all ranks, if the difference is an
    error.

    name: begins the names of its collectives.  attempt: at the step.
    survives: the state is of an earlier generation of Horovod.
    """
    step = compressor.step
    numbers = [step, tables_fitted(compressor), attempt, int(step == 0 or survives)]
    own = torch.tensor(numbers, device="cpu")
    rows = world.gather_equal(own, f"{name}.newcomers").tolist()
    others = [rank for rank, row in enumerate(rows) if row[:2] != rows[0][:2]]
    steps = [row[0] for row in rows]
    torn = [attempt > 0 and step == steps[0] for step, _, attempt, _ in rows]
    may_take = [bool(row[3]) or of_fit for row, of_fit in zip(rows, torn, strict=True)]
    same_attempt = len({row[2] for row in rows}) == 1
    if not (others and same_attempt and all(may_take[rank] for rank in others)):
        return False
    state = _first_state(world, compressor, f"{name}.newcomers.state")
    takes = world.rank in others
    logger.log(
        logging.WARNING if takes else logging.INFO,
        "ranks %s were at steps %s, and go on from the first rank's step %d with its level tables; "
        "residuals of newcomers start from zero",
        [world.process_set.ranks[rank] for rank in others],
        sorted({steps[rank] for rank in others}),
        steps[0],
    )
    if takes:
        residuals = compressor._training.residuals
        compressor.load_state_dict(with_own(state, compressor.state_dict()), in_step=True)
        compressor._training.residuals = residuals
    return True


def _first_state(world: HorovodWorld, compressor: GradientCompressor, name: str) -> dict:
    """Return the first rank's state, without the values that belong to each rank."""
    data = torch.empty(0, dtype=torch.uint8, device="cpu")
    if world.rank == 0:
        file = io.BytesIO()
        torch.save(without_own(compressor.state_dict()), file)
        data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    data = world.wait(world.allgather(data, name), name)
    return torch.load(io.BytesIO(bytes(data.numpy())), weights_only=True)
