"""Support compressors and LocalSGD in ``hvd.elastic.TorchState(..., compression=compressor)``.

``register_handler`` adds a handler of compressors' states to Horovod's registry of state handlers.
It works as follows when workers join or leave:

1. ``save`` (state.commit) keeps a copy of the compressor's state in memory.
2. ``restore`` (after the loss of a worker in the middle of a step) returns to that copy, as the
   model does.
3. ``sync`` (before training continues with other workers) copies the first rank's tables, step and
   settings to all ranks. Residuals, which belong to each rank, are not copied; newcomers have none.
   The residuals of lost workers are lost.
"""

from __future__ import annotations

import copy
import io
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch

from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.hooks.horovod.agreement import tables_fitted
from hvd_adaptive.transport.horovod_world import HorovodWorld


class _Handler:
    """Base of Horovod's StateHandlers."""

    def __init__(self, value: Any) -> None:
        self.set_value(value)

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of the current state."""
        self._saved = copy.deepcopy(self.value.state_dict())


class CompressorStateHandler(_Handler):
    """Horovod's StateHandler for compressors."""

    def restore(self) -> None:
        """Return to the saved state. Collectives in flight have failed with Horovod."""
        _disconnect(self.value)
        self.value.load_state_dict(self._saved)
        if self.value._training.residuals is not None:
            self.value._training.residuals.load_from(self.value._training.residuals)

    def sync(self) -> None:
        """Load the first rank's state on every rank. This is a collective."""
        import horovod.torch as hvd

        from hvd_adaptive.hooks.horovod.binding import forget_names

        compressor, residuals = self.value, self.value._training.residuals
        _disconnect(compressor)
        forget_names()
        own = compressor.state_dict()
        shared = hvd.broadcast_object(without_own(own), 0, name="hvd_adaptive.elastic.state")
        compressor.load_state_dict(with_own(shared, own))
        if residuals is not None and compressor._training.residuals is not None:
            compressor._training.residuals.load_from(residuals)
        self.save()


def _disconnect(compressor: GradientCompressor) -> None:
    """Drop a step in progress with its optimizer; nothing of it may wait for Horovod any more."""
    compressor._training.connection = None
    compressor._training.meter.give_up()


class LocalStateHandler(_Handler):
    """Horovod's StateHandler for LocalSGD.

    Within a round each rank has parameters and a state of its own. ``sync`` copies the first rank's
    to all ranks, so what the others have learned since the last round is lost.
    """

    def restore(self) -> None:
        """Return to the saved state. Collectives in flight have failed with Horovod."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load the first rank's state on every rank, and find the ranks anew; a collective."""
        import horovod.torch as hvd

        local = self.value
        local.connect()
        own = local.state_dict()
        compressor = own["compressor"]
        shared = own | {"compressor": compressor and without_own(compressor)}
        shared = hvd.broadcast_object(shared, 0, name="hvd_adaptive.elastic.local")
        if compressor is not None:
            shared["compressor"] = with_own(shared["compressor"], compressor)
        local.load_from(shared)
        self.save()


def register_handler(kind: type, handler: type) -> None:
    """Register a handler of a class with Horovod if its elastic module has been imported."""
    horovod = sys.modules.get("horovod.torch.elastic.state")
    if horovod is None:
        return
    registry = horovod.get_handler_registry()
    if not any(known is kind for known, _ in registry):
        # Before the handler of torch.optim.Optimizer, which LocalSGD is, too.
        horovod.set_handler_registry([(kind, handler), *registry])


def without_own(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a compressor's state without the values that belong to each rank.

    These are the residuals, the samples for the next fit, and what the rank has sent since the last
    update.
    """
    own = ("residuals", "residuals_checksum", "window")
    shared = {name: value for name, value in state.items() if name not in own}
    if "sent" in state:
        shared["sent"] = torch.zeros_like(state["sent"])
    if "parts" in state:
        shared["parts"] = {label: without_own(part) for label, part in state["parts"].items()}
    return shared


def with_own(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return another rank's state with this rank's record of what it has sent."""
    state = dict(shared)
    if "sent" in shared and "sent" in own:
        state["sent"] = own["sent"]
    parts = own.get("parts", {})
    if "parts" in shared:
        state["parts"] = {
            n: with_own(part, parts.get(n, {})) for n, part in shared["parts"].items()
        }
    return state


logger = logging.getLogger("hvd_adaptive")


def take_first_state(
    world: HorovodWorld, compressor: GradientCompressor, name: str, attempt: int, survives: bool
) -> bool:
    """Give ranks that differ in the step alone the same state. This is a collective.

    Elastic Horovod starts workers in the middle of training. Their compressors are new, at step 0,
    and those of workers that survived a crash may be a step apart. If the elastic state does not
    hold the compressor, ranks detect here that they differ in the step alone.

    A rank adopts the first rank's state if its own is at step 0, or of an earlier generation of
    Horovod. It also does so if it has another table at the same step, and an attempt at the step
    was given up while tables were fitted. Any other difference is an error of the program: a rank
    made one more step, or loaded another checkpoint. Residuals belong to each rank: newcomers have
    none, and the other ranks keep theirs.

    Args:
        world: The ranks, none of which has sent anything of the step.
        name: Beginning of the collectives' names.
        survives: The state is of an earlier generation of Horovod.

    Returns:
        False, on all ranks, if the difference is an error.
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
