"""Number the compressors of a process, so that no two draw the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hvd_adaptive.base.checks import check_integer
from hvd_adaptive.kernels.random import Use, stream_key

# Largest distance of another rank's number from its own that a receiver accepts.
NEAR = 64
MOST = 2**63 - 1


def key_of(number: int, seed: int, rank: int, step: int, group: int) -> int:
    """Return the key of a stream of compressor ``number``; that of compressor 0 has no number."""
    return stream_key(seed, rank, step, group, *([number] if number else []))


@dataclass
class Instance:
    """Numbers of a compressor in the keys of its random streams; None until they are needed.

    Attributes:
        training: Number of compressors of this process that were bound to gradients before this
            one. It is usually the same on all ranks, but need not be, as a payload's header
            contains its key.
        alone: Number of compressors that called ``encode`` without a seed before this one.
    """

    training: int | None = None
    alone: int | None = None

    @property
    def proposed(self) -> int:
        """Return the number of this compressor among those that train, or the next free one."""
        return _next["training"] if self.training is None else self.training

    def bind(self, number: int | None = None) -> None:
        """Number this compressor among those that train, once; ``number`` is what ranks have agreed
        on, at least ``proposed`` on each of them.
        """
        if number is not None:
            self.training = number
            _next["training"] = max(_next["training"], number + 1)
        elif self.training is None:
            self.training = _next_number("training")

    def key(self, seed: int, rank: int, step: int, group: int) -> int:
        """Return the key of a stream in training, or in a simulation of it."""
        return key_of(self.training or 0, seed, rank, step, group)

    def keys(self, seed: int, rank: int, step: int, group: int) -> Iterator[int]:
        """Yield the keys that another rank's stream may have, the most likely first."""
        own = self.training or 0
        yield key_of(own, seed, rank, step, group)
        for number in range(max(0, own - NEAR), own + NEAR + 1):
            if number != own:
                yield key_of(number, seed, rank, step, group)

    def next_alone(self, seed: int, rank: int, call: int) -> int:
        """Return the key of call ``call`` of ``encode`` without a seed."""
        if self.alone is None:
            self.alone = _next_number("alone")
        return key_of(self.alone, seed, rank, call, Use.ENCODE)

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Return {"instance": the assigned numbers}, or {} if there are none."""
        known = {name: n for name, n in vars(self).items() if n is not None}
        return {"instance": known} if known else {}

    def loaded(self, known: dict[str, int]) -> Instance:
        """Return an instance with these numbers, or with its own if they are missing; raise
        ValueError if they are invalid. Compressors that are made later get other numbers.
        """
        if not isinstance(known, dict) or not known.keys() <= vars(self).keys():
            raise ValueError(f"state: instance={known!r}: must be a dict of {list(vars(self))}")
        for name, number in known.items():
            check_integer(f"state: instance[{name!r}]", number, 0, MOST)
        for name, number in known.items():
            _next[name] = max(_next[name], number + 1)
        return replace(self, **known)


_next: dict[str, int] = {}


def _next_number(name: str) -> int:
    _next[name] += 1
    return _next[name] - 1


def start_over() -> None:
    """Number compressors from zero again, as a new process does, to repeat a run in one process."""
    _next.update(training=0, alone=0)


start_over()
