"""This rank's position in training, which must be the same on all ranks."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.hooks.horovod.agreement import LATER_SECONDS, compare
from hvd_adaptive.hooks.horovod.newcomers import tables_fitted
from hvd_adaptive.hooks.horovod.placeholder import Template, disagreement
from hvd_adaptive.run.description import Description

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.hooks.horovod.binding import Binding


class Position:
    """The step, the attempt at it, the fits of tables before it, and whether one is due."""

    def __init__(self, compressor: GradientCompressor) -> None:
        self._compressor = compressor
        self._due = (-1, False)
        self._tables = 0  # as tables_fitted counts, before the step that _due is of

    def forget_due(self) -> None:
        """Evaluate the schedule again when it is next needed."""
        self._due = (-1, False)

    def update_due(self, binding: Binding, step: int) -> bool:
        """Return whether tables are fitted at ``step``. The schedule, which may be a user's
        function, is evaluated once a step."""
        if self._due[0] != step:
            binding.prepare(step)
            self._due = (step, self._compressor.updates.due(step))
            self._tables = tables_fitted(self._compressor)
        return self._due[1]

    def template(self, binding: Binding) -> Template:
        """Return what makes the placeholders of this step.

        They cover all that must be the same on all ranks before they wait for each other: the names
        of collectives (settings, layout, instance), the attempt, the tables, and whether this is an
        update step.
        """
        step = self._compressor.step
        named = "" if binding.layout is None else binding.name
        agreed = _crc(
            self._compressor.codec.settings_fingerprint, binding.comparison.checksum, named
        )
        due, updates = self.update_due(binding, step), self._compressor.updates
        fits = due, updates.first_due(step), updates.needs_samples(step)
        progress = _crc(binding.given_up.attempt, *fits, self._tables)
        groups = 0 if binding.layout is None else binding.layout.fingerprint
        return Template(binding.world.rank, step, agreed, progress, groups)

    def mismatch(self, binding: Binding, reduced: torch.Tensor) -> str:
        """Return what ranks disagree on, after a reduced placeholder has shown that they do.

        Every rank that reads such a placeholder compares descriptions with the others. The result
        is "" if ranks cannot find out.
        """
        name = disagreement(reduced, binding.world.size)
        if name is None:
            return ""
        own = binding.comparison.description() | self._description(binding)
        name = f"hvd_adaptive.disagreement.{name}"
        return compare(binding.world, own, name, LATER_SECONDS) or ""

    def _description(self, binding: Binding) -> Description:
        step = self._compressor.step
        self.update_due(binding, step)
        updates = self._compressor.updates
        due = {True: "due", False: "not due"}
        return {
            "the step": {
                "its number": str(step),
                "a fit of tables (update_steps)": due[updates.first_due(step)],
                "a fit of averages' tables": due[updates.second_due(step)],
                "samples for a fit": due[updates.needs_samples(step)],
                "its attempt": str(binding.given_up.attempt),
                "tables fitted so far": str(self._tables),
            },
            "the order of optimizers": {"those before this one": binding.name.rpartition(".")[2]},
        }


@functools.lru_cache(maxsize=16)
def _crc(*agreed: Hashable) -> int:
    return zlib.crc32(repr(agreed).encode())
