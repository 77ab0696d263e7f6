"""Define GradientCompressor, the interface of every scheme to Horovod and to a user."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive import states
from hvd_adaptive.base.checks import check_integer
from hvd_adaptive.base.errors import PayloadError, WarnOnce
from hvd_adaptive.base.tensors import check_supported
from hvd_adaptive.changes import Changing
from hvd_adaptive.codec.codec import Codec, check_scheme
from hvd_adaptive.coding import payload as payloads
from hvd_adaptive.coding.payload import DTYPE_CODES
from hvd_adaptive.connection import Connection, RefusesClasses, framework
from hvd_adaptive.differentiable import Differentiable
from hvd_adaptive.kernels.random import Use, stream_key
from hvd_adaptive.options import from_plain, plain
from hvd_adaptive.parts import Parts
from hvd_adaptive.settings import keyword_of
from hvd_adaptive.training import Training, rank_and_size

logger = logging.getLogger("hvd_adaptive")

_plugging = threading.Lock()
_warn_alone = WarnOnce(logger)

# Horovod's own base class if the user has already imported it; `import hvd_adaptive` never does.
_horovod = sys.modules.get("horovod.torch.compression")
if TYPE_CHECKING:
    _Base = object
else:
    _Base = _horovod.Compressor if _horovod is not None else object


def _in_ordinary_mode(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function`` outside of inference mode, so that tensors made there can be changed later.

    A user's optimizer.step() may run in inference mode, but tensors that are kept from step to step
    are also used in ``backward``.
    """
    with torch.inference_mode(False), torch.no_grad():
        return function(*arguments)


class GradientCompressor(Changing, _Base, metaclass=RefusesClasses):
    """Base of all schemes: Horovod's Compressor interface, encode and decode, state and report.

    Args:
        codec: Codec of the default part; it has the settings.

    Attributes:
        settings: Keywords that all schemes share.
        parts: The codecs of the parts by label, a mapping; each has its own level table. The label
            is "" for the default part, which is also ``parts.default``; "bits=4" for parameters
            whose ``parameter_bits`` are 4; a parameter's name with ``scope="tensor"``, known after
            the first gradients.
        step: Number of the next step.

    Examples:
        >>> from hvd_adaptive import ALQ
        >>> compressor = ALQ(bits=3)
        >>> gradient = torch.randn(8192)
        >>> payload = compressor.encode(gradient)
        >>> payload.dtype
        torch.uint8
        >>> compressor.decode(payload).shape
        torch.Size([8192])
        >>> compressor.set(bits=4)  # on every rank, before the same step
        >>> torch.save(compressor.state_dict(), "compressor.pt")
    """

    def __init__(self, codec: Codec) -> None:
        settings = codec.settings
        if settings.coding not in codec.codings:
            allowed, scheme = ", ".join(map(repr, codec.codings)), type(self).__name__
            raise ValueError(f"coding={settings.coding!r}: {scheme} allows {allowed} alone")
        framework().constructed(self)
        self._codec, self.settings = codec, settings
        self.parts = Parts(codec, _maker(type(self), self._keywords, "for_parts"))
        self._training = Training(self.parts)
        self.step = 0

    @property
    def _again(self) -> Callable[..., Any]:
        """Return a function (*dropped, **changes): a codec with these keywords, for averages."""
        return _maker(type(self), self._keywords, "for_parts", "for_averages")

    # What a user and Horovod call ---------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Accept a gradient, and return a small placeholder for Horovod to reduce.

        The gradient must not change until it has been decompressed. Integer and sparse tensors
        are returned unchanged, for Horovod to reduce. If the tensor requires a gradient and belongs
        to no optimizer, its average has one, too: the allreduce of the gradient, uncompressed.

        Returns:
            The placeholder and the context for ``decompress``.
        """
        connection = self._training.connection or self._plugged()
        if torch.is_inference_mode_enabled():
            small, ctx = _in_ordinary_mode(connection.compress, tensor)
        else:
            small, ctx = connection.compress(tensor)
        is_plain = small is tensor or not tensor.requires_grad or not torch.is_grad_enabled()
        if is_plain or connection.layout is not None:
            return small, ctx
        differentiable = Differentiable(ctx)
        return differentiable.sent(tensor, small), differentiable

    def decompress(self, output: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the averaged gradient of ``ctx``; the first call of a step ends its exchange.

        Raises:
            RankMismatchError: The ranks' placeholders show that ranks differ.
            PayloadError: A payload arrived corrupt.
        """
        if ctx is None:
            return output
        if isinstance(ctx, torch.dtype):  # Horovod has reduced it in float32
            return output.to(ctx)
        if isinstance(ctx, Differentiable):
            return ctx.received(output, self.decompress(output.detach(), ctx.ctx))
        connection = self._training.connection or self._plugged()
        if torch.is_inference_mode_enabled():
            return _in_ordinary_mode(connection.decompress, output, ctx)
        return connection.decompress(output, ctx)

    def encode(self, flat: torch.Tensor, *, seed: int | None = None) -> torch.Tensor:
        """Encode a 1-D floating-point tensor as a payload (uint8, 1-D, same device).

        Quantised values are converted to float32; float64 values beyond its range become NaN.

        Args:
            flat: Coordinates, float16, bfloat16, float32 or float64.
            seed: Seed of the random numbers, for repeatable payloads, which do not depend on the
                compressor. If None, each call, compressor and rank draws fresh numbers.

        Raises:
            ValueError: ``flat`` or ``seed`` is not allowed.
        """
        if not isinstance(flat, torch.Tensor) or flat.dtype not in DTYPE_CODES:
            kind = flat.dtype if isinstance(flat, torch.Tensor) else type(flat).__name__
            raise ValueError(
                f"flat: must be a float16, bfloat16, float32 or float64 tensor, not {kind}"
            )
        if flat.dim() != 1:
            raise ValueError(f"flat: must have one dimension, not shape {tuple(flat.shape)}")
        if flat.layout != torch.strided:
            raise ValueError(f"flat: must be a dense tensor, not {flat.layout}")
        check_supported(flat.device)
        self._codec.payloads.check_device(flat.device)
        if seed is None:
            key = self._training.next_key(self.settings.seed, rank_and_size()[0])
        else:
            key = stream_key(check_integer("seed", seed, 0, 2**64 - 1), 0, 0, Use.ENCODE)
        flat = flat.detach().resolve_neg().contiguous()
        quantized = self.settings.quantized_part(flat.numel())
        return self._codec.payloads.encode(flat, quantized, key).bytes

    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the decoded tensor, of the length and dtype that was encoded.

        Raises:
            ValueError: The payload is on a device that is not supported.
            PayloadError: The payload is short, foreign or corrupt, or was encoded with other
                settings or another table version.
        """
        if not isinstance(payload, torch.Tensor) or payload.dtype != torch.uint8:
            raise PayloadError("payload: must be a uint8 tensor")
        check_supported(payload.device)
        header = payloads.read_header(payload.reshape(-1))
        return self._codec.payloads.sum([payload.reshape(-1)], header, 1.0)

    # State and report ---------------------------------------------------------------------------

    def _load_from(self, old: GradientCompressor, keep: bool) -> None:
        self.step = old.step
        self.parts.load_from(old.parts, keep)
        self._codec.load_tables_from(old._codec, keep)
        self._training.load_from(old._training, keep, self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, as plain tensors and numbers.

        The state includes the stream of random numbers. Load it only into a compressor that
        replaces this one; two that are used side by side would draw the same numbers.

        With error feedback each rank has residuals of its own, as of the last complete step, and
        ECDQ counts the bits that each rank has sent since the last update. Then every rank must
        save and load its own state, for example its entry of the list
        ``hvd.allgather_object(compressor.state_dict())``. Averages in the background end first.
        """
        self._settle()
        own = {"scheme": self._codec.name, "step": self.step}
        settings = {name: plain(value) for name, value in self._changed.items()}
        changed = {"settings": settings} if settings else {}
        tables = self.parts.state_dict() | self._codec.tables_state()
        return own | changed | tables | self._training.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, in_step: bool = False) -> None:
        """Load what ``state_dict`` returned. A step in progress is given up; averages in the
        background end first.

        Settings that ``set`` or the schedule had changed come from the state. Residuals are matched
        by parameters' names. Residuals of another rank or number of ranks are dropped with a
        warning at the next step.

        Args:
            in_step: Keep the step in progress and the settings, before anything is sent.

        Raises:
            ValueError: The state is of another scheme or incomplete; nothing has changed.
        """
        if in_step:
            self._load_state(state)
            return
        self._training.wait()
        saved = states.mapping(states.mapping(state).get("settings", {}), "state: settings")
        if any(isinstance(value, torch.Tensor) for value in saved.values()):
            raise ValueError(f"state: settings must be plain values, not tensors: {saved!r}")
        try:
            changed = {name: from_plain(value) for name, value in saved.items()}
            new = None if changed == self._changed else self._with(changed)
        except (TypeError, ValueError) as error:
            raise ValueError(f"state: settings {saved!r} do not fit: {error}") from error
        if new is None:
            self._load_state(state)
            if self._training.connection is not None:
                self._training.connection.abandon()
        else:
            new._load_state(state)  # raises an error if it does not fit
            self._construct(changed)
            self._load_state(state)
            self._rebind()
        self._training.loads += 1
        self._next, self._scheduled_at = None, -1

    def _load_state(self, state: dict[str, Any]) -> None:
        """Load a state of these settings; raise ValueError, and change nothing, if it is wrong."""
        check_scheme(state, self._codec.name)
        step = states.whole(state, "step")
        self._training.check_state(state)
        tables = self._codec.tables_in(state)
        parts = self.parts.loaded(state)
        self._training.instance = self._training.instance.loaded(state)
        self.step = step
        self.parts.use(parts)
        vars(self._codec).update(tables)
        self._training.load_state(state)

    def report(self) -> dict[str, Any]:
        """Return what this rank sent in the last step, and its error, as a dict.

        - ``coordinates``: Number of gradient coordinates encoded.
        - ``uncompressed_bytes``: Their bytes before encoding.
        - ``payload_bytes``: Bytes encoded.
        - ``wire_bytes``: Bytes of payloads sent by this rank, computed (docs/monitoring.md).
        - ``bits_per_coordinate``: 8 payload_bytes / coordinates.
        - ``relative_error``: ‖Q(v) - v‖²/‖v‖² of the coordinates v that this rank quantises,
          estimated from some buckets (docs/monitoring.md).
        - ``non_finite``: Number of averaged buckets that a NaN or Inf of any rank has made NaN.
        - ``encode_s``, ``decode_s``: Seconds of encoding and of decoding.
        - ``exchange_s``: Seconds of waiting for the exchange.
        - ``peak_bytes``: Most memory held beyond the gradients (docs/failures.md).
        - ``table_version``: How often the level table was fitted; of the part that was fitted most
          often.
        - ``exchange``: Name of the exchange, None if it is not known yet.

        Before the first exchange, and with one rank, which exchanges nothing, all figures are 0 and
        ``relative_error`` is NaN.
        """
        if self._training.meter.last is None and rank_and_size()[1] == 1:
            _warn_alone(
                "report(): all figures are 0 or NaN because one rank exchanges nothing, and its "
                "gradients are not compressed; start two or more ranks, by torchrun "
                "--nproc-per-node 2 or mpirun -np 2, or use encode() and decode()"
            )
        self._warn_if_unused()
        version = max(codec.table_version for codec in self.parts.values())
        connection = self._training.connection
        known = self.settings.exchange_name if connection is None else connection.exchange
        return self._training.meter.report() | {"table_version": version, "exchange": known}

    def _warn_if_unused(self) -> None:
        """Warn if gradients should have reached this compressor, and none has."""
        warn = getattr(self._training.connection, "warn_if_unused", None)
        if warn is not None and self._training.meter.last is None and rank_and_size()[1] > 1:
            warn()

    def close(self) -> None:
        """Release the optimizer and its gradients; the compressor can then serve another.

        A step in progress is given up; averages in the background are waited for. With
        DistributedDataParallel every rank must then call this at the same place.
        """
        self._training.wait()
        connection, self._training.connection = self._training.connection, None
        if connection is not None:
            connection.abandon()

    def _plugged(self) -> Connection:
        with _plugging:  # backward passes in several threads may begin at once
            if self._training.connection is None:
                self._training.connection = framework().connect(self)
            return self._training.connection

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._codec.described})"


def _maker(scheme: type, keywords: Mapping[str, Any], *uses: str) -> Callable[..., Any]:
    """Return a function (*dropped, **changes) that returns a new codec of ``scheme``.

    It has those of the ``keywords`` whose declarations have all ``uses``.
    """
    kept = {
        name: value
        for name, value in keywords.items()
        if all(getattr(keyword_of(name), use) for use in uses)
    }
    return functools.partial(_codec, scheme, kept)


def _codec(scheme: Any, keywords: Mapping[str, Any], *dropped: str, **changes: Any) -> Any:
    kept = {name: value for name, value in keywords.items() if name not in dropped}
    return scheme(**kept | changes).parts.default


def check_compressor(name: str, value: Any, is_free: bool = False) -> GradientCompressor:
    """Return a compressor, one that serves nothing if ``is_free``; raise ValueError for others."""
    if isinstance(value, type) and issubclass(value, GradientCompressor):
        scheme = value.__name__
        raise ValueError(f"{name}={scheme}: is a class; give an instance, {name}={scheme}(...)")
    if not isinstance(value, GradientCompressor):
        raise ValueError(f"{name}={value!r}: must be a compressor of hvd_adaptive")
    if is_free and value._training.connection is not None:
        raise ValueError(f"{name}: already serves an optimizer or a model; create another")
    return value
