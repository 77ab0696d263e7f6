"""Keep the tensors of Horovod's collectives referenced until these have ended.

When a collective ends, Horovod's background thread drops its references to the collective's
tensors. If only Python refers to a tensor afterwards, or nothing does, PyTorch acquires the GIL to
update or free the Python object. After a failure, e.g. the death of a rank, the thread does so for
all collectives in flight while it holds the locks that every new collective needs. A thread that
submits a collective waits for these locks with the GIL, and both threads wait forever. A view is
another C++ reference to its tensor, so while views exist, the GIL is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def reference(tensor: torch.Tensor) -> torch.Tensor:
    """Return an object that holds a C++ reference to ``tensor`` itself, not to its memory alone.

    If ``tensor`` is a view, the reference is to the tensor that it is a view of.
    It is an empty view: ``view_as`` reads the shape twice, and raises an error if Horovod's thread
    gives an output its size in between.
    """
    return tensor.as_strided((0,), (1,), 0)


class References:
    """References to the tensors of collectives that have not ended without error.

    Handles belong to a generation of Horovod, see ``HorovodWorld.generation``: its dict of handles
    and their tensors. References of failed collectives are dropped with their generation, when
    Horovod has stopped.
    """

    def __init__(self) -> None:
        self._generation: Any = None
        self._references: dict[Any, list[torch.Tensor]] = {}

    def add(self, generation: Any, handle: Any) -> None:
        """Refer to the tensors of the collective ``handle``, which was submitted just now."""
        if generation is not self._generation:
            self._generation, self._references = generation, {}
        self._references[handle] = [reference(tensor) for tensor in _tensors(generation[handle])]

    def end(self, handle: Any) -> None:
        """Drop the references of a collective that has ended without error."""
        self._references.pop(handle, None)

    def __len__(self) -> int:
        return len(self._references)


def _tensors(submitted: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in nested tuples."""
    if isinstance(submitted, torch.Tensor):
        yield submitted
    elif isinstance(submitted, tuple | list):
        for part in submitted:
            yield from _tensors(part)


REFERENCES = References()
