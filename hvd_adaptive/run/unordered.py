"""Define UnorderedStep, a step whose ranks pair collectives by name."""

from __future__ import annotations

import torch

from hvd_adaptive.base.errors import given_up
from hvd_adaptive.run.step import Step


class UnorderedStep(Step):
    """A step of which each rank launches a group, and advances it, as soon as it can."""

    is_received = False
    _overlaps = False  # see ``Exchange.overlaps``; a GPU's groups never do

    def renumber(self, number: int) -> None:
        """Adopt the number of the first rank, before anything is sent."""
        self.number = self._trips.number = number

    @property
    def arrived(self) -> dict[int, torch.Tensor]:
        """Return the gradients by slot."""
        with self.lock:
            self.arrivals.read()
            there = enumerate(self.arrivals.tensors)
            return {slot: tensor for slot, tensor in there if tensor is not None}

    def _launch(self) -> None:
        """Launch groups that are ready, in order, within the bound on memory."""
        arrivals = self.arrivals
        if arrivals.mail:
            arrivals.read()
        while self._next > 0 and (self._all_arrived or not arrivals.lacking[self._next - 1]):
            index = self._next - 1
            if arrivals.lacking[index] == self.layout.counts[index]:
                self._next = index
                continue
            plan = self.binding.plans(self.layout)[index]
            bound = self.binding.settings.tuning.in_flight_bytes
            if self._flying and self._held + plan.most > bound:
                break
            self._next = index
            self._overlaps = arrivals.on_cpu and self.binding.exchange.overlaps
            self._start(index, plan)
            self._submit_second_stages()
        self.is_received = not self._flying and self._next == 0

    def _submit_second_stages(self) -> None:
        """Submit the second stages of groups whose first stage has been received, without waiting.

        Ranks do so at different times; Horovod orders collectives. There is no deadlock: all ranks
        advance first stages in the order of their launch, so a rank that waits for its oldest group
        waits for ranks that are behind it, or for an older group. Averages are not decoded here,
        because they would overwrite memory into which autograd may still accumulate.
        """
        if not self._overlaps:
            return
        for flight in tuple(self._flying):
            if flight.stage == 0:
                if flight.plan.collectives != 2 or not self.binding.world.poll(flight.handle):
                    return
                self._advance(flight)

    def _receive(self) -> None:
        """Advance groups whose collective has been received, without waiting.

        A group's first stage is advanced in the order of launch (``_submit_second_stages``). After
        its last stage a group submits nothing, so the order does not matter. Other stages are
        advanced in the order of their submission, after all gradients have arrived.
        """
        poll, first_is_next, overlaps = self.binding.world.poll, True, self._overlaps
        for flight in tuple(self._flying):
            is_first = overlaps and flight.stage == 0 and first_is_next
            is_second_next = is_first and flight.plan.collectives == 2
            is_last = overlaps and flight.plan.collectives == flight.stage + 1
            is_oldest = self._all_arrived and self._flying and flight is self._flying[0]
            if (is_second_next or is_last or is_oldest) and poll(flight.handle):
                self._advance(flight)
            first_is_next = first_is_next and flight.stage > 0

    def _from_all(self, own: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors; averages replace gradients meanwhile, once one has."""
        world, name = self.binding.world, self._trips.name("corrupt")
        handle = world.allgather(own, name)
        while not (self.arrivals.is_early or world.is_left) and self.write_next():
            pass
        return world.wait(handle, name).view(world.size, *own.shape)

    def _advance_oldest(self) -> None:
        """Wait for the collective that was submitted first, and advance its group."""
        if not self._flying:
            raise given_up()
        self._advance(self._flying[0])
