"""Save what each rank has for itself by torch.distributed.checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_adaptive import states
from hvd_adaptive.training import running_horovod


class PerRank:
    """Objects whose states differ between ranks, for torch.distributed.checkpoint.

    ``dcp.save`` keeps one rank's tensors of a name, and ``dcp.load`` reads those that a new state
    has. So residuals, and parameters within a round of LocalSGD, would be lost or mixed up. This
    object has one entry, "rank 0 of 2", in every step: the whole states of the rank. Another number
    of ranks has other entries, which ``dcp.load`` refuses.

    Without torch.distributed, ranks of Horovod do not share a checkpoint: each must save and load a
    folder of its own, such as ``checkpoint_id=f"checkpoint-{hvd.rank()}"``.

    Args:
        **parts: Objects with ``state_dict`` and ``load_state_dict``, in the order in which they are
            loaded.

    Raises:
        TypeError: There is no part, or a part has no name.
        ValueError: A part is none.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> from hvd_adaptive import LocalSGD
        >>> from hvd_adaptive.checkpoint import PerRank
        >>> optimizer = LocalSGD(optimizer, every=20)
        >>> parts = {"local": PerRank(model=net, optimizer=optimizer)}
        >>> saved = dcp.save(parts, checkpoint_id="checkpoint")
        >>> dcp.load(parts, checkpoint_id="checkpoint")
    """

    def __init__(self, *unnamed: Any, **parts: Any) -> None:
        if unnamed or not parts:
            given = ", ".join(type(part).__name__ for part in unnamed) or "none was given"
            raise TypeError(
                f"parts: {given}: must be given by name, such as PerRank(compressor=compressor)"
            )
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ValueError(
                    f"{name}: must have state_dict and load_state_dict, not {type(part).__name__}"
                )
        self._parts = parts

    def state_dict(self) -> dict[str, bytes]:
        """Return the states of this rank as one entry; ``dcp.save`` and ``dcp.load`` call this."""
        return {key_of_rank(): packed({n: part.state_dict() for n, part in self._parts.items()})}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Load what ``state_dict`` returned on this rank.

        Raises:
            ValueError: The state is of other parts, or incomplete.
        """
        own = unpacked(state, key_of_rank())
        found = {name: states.entry(own, name) for name in self._parts}
        for name, part in self._parts.items():
            part.load_state_dict(found[name])


def key_of_rank() -> str:
    """Return the key of this rank's own state; ranks are torch.distributed's, which ``dcp.save``
    writes for, or else Horovod's.
    """
    if dist.is_available() and dist.is_initialized():
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"
    if (hvd := running_horovod()) is not None:
        return f"rank {hvd.rank()} of {hvd.size()}"
    return "rank 0 of 1"


def packed(state: Any) -> bytes:
    """Return a state in one piece, because a checkpoint would mix tensors of several ranks."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def unpacked(state: Mapping[str, bytes], key: str) -> Any:
    """Return the state that was packed as the entry ``key``."""
    data = states.entry(state, key)
    if not isinstance(data, bytes):
        raise ValueError(f"state: {key!r} must be bytes, not {type(data).__name__}")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
