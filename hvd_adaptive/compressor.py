"""Define GradientCompressor, the interface of every scheme to Horovod and to a user."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from hvd_adaptive import states
from hvd_adaptive._version import __version__
from hvd_adaptive.changes import Changing
from hvd_adaptive.checks import check_integer
from hvd_adaptive.coding import payload as payloads
from hvd_adaptive.coding.header import DTYPE_CODES
from hvd_adaptive.connection import Connection, Host
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.exchange.staged_codec import StagedCodec
from hvd_adaptive.feedback import Residuals, check_residuals
from hvd_adaptive.instances import Instance
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.layout import Layout
from hvd_adaptive.monitor import StepMeter
from hvd_adaptive.on_class import callable_on_class
from hvd_adaptive.parts import Parts
from hvd_adaptive.settings import Settings
from hvd_adaptive.streams import Use

logger = logging.getLogger("hvd_adaptive")

_plugging = threading.Lock()

# Horovod's own base class if the user has already imported it; `import hvd_adaptive` never does.
_horovod = sys.modules.get("horovod.torch.compression")
_Base: Any = _horovod.Compressor if _horovod is not None else object


def _rank() -> int:
    """Return this process's rank in Horovod or torch.distributed, or 0 if neither is running."""
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        return hvd.rank()
    distributed = torch.distributed
    running = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if running else 0


@contextlib.contextmanager
def _ordinary_mode() -> Iterator[None]:
    """Leave inference mode, so that tensors made here can be changed later.

    A user's optimizer.step() may run in inference mode, but tensors that are kept from step to step
    are also used in ``backward``.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class GradientCompressor(Changing, StagedCodec, _Base):
    """Base of all schemes: Horovod's Compressor interface, encode and decode, state and report."""

    host: ClassVar[Host]

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.host.constructed(self)
        self._parts = Parts(type(self), self._keywords, settings)
        self.step = 0
        self.meter = StepMeter()
        weight = settings.error_feedback
        self.residuals = None if weight is None else Residuals(weight, settings.grad_scaler)
        self._encodes = 0
        self.instance = Instance()
        self._session: Connection | None = None

    # Level tables: adaptive schemes override these ------------------------------------------------

    def update_due(self, step: int) -> bool:
        """Return whether tables are refitted at ``step``; never for fixed tables."""
        return False

    def update(
        self,
        step: int,
        samples: Callable[[int, str], list[torch.Tensor]],
        sync: Callable,
        parts: Sequence[str] = ("",),
        finite: bool = True,
    ) -> None:
        """Refit the tables of ``parts``, on all ranks.

        Args:
            step: Number of the step.
            samples: Function (count, part) that draws buckets of this rank's gradients.
            sync: Function (vector, fit) that calls ``fit`` with the vectors of all ranks on the
                first rank, and returns its result on every rank.
            parts: Labels of the parts.
            finite: Whether this rank's gradients are finite. If those of any rank are not, nothing
                is fitted.
        """

    def prepare_second_stages(self, ranks: int, labels: Sequence[str], step: int) -> None:
        for label in labels:
            self.part(label).second_stage(ranks)

    # Parts: parameters with bits or tables of their own ------------------------------------------

    def part(self, label: str) -> GradientCompressor:
        """Return the codec of a part: a compressor with its own table.

        Args:
            label: "" for the default part, which is this compressor; "bits=4" for parameters whose
                ``parameter_bits`` are 4; a parameter's name with ``scope="tensor"``.

        Raises:
            ValueError: There is no such part.
        """
        return self if label == "" else self._parts[label]

    def part_of(self, name: str) -> str | None:
        """Return the label of a parameter's part, or None for full precision."""
        return self._parts.label_of(name)

    @property
    def parts(self) -> dict[str, GradientCompressor]:
        """Return codecs by label, the default part "" first.

        With ``scope="tensor"`` the others are known after the first gradients.
        """
        return {"": self} | self._parts.codecs

    def know_parameters(self, names: Sequence[str]) -> None:
        """Warn of patterns in ``parameter_bits`` that match none of the parameters' names."""
        self._parts.warn_of_idle_patterns(names)

    # What a user and Horovod call ---------------------------------------------------------------

    @callable_on_class
    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Accept a gradient, and return a small placeholder for Horovod to reduce.

        The gradient must not change until it has been decompressed. Integer and sparse tensors
        are returned unchanged, for Horovod to reduce.

        Returns:
            The placeholder and the context for ``decompress``.
        """
        with _ordinary_mode():
            return self._plugged().compress(tensor)

    @callable_on_class
    def decompress(self, output: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the averaged gradient of ``ctx``; the first call of a step ends its exchange.

        Raises:
            RankMismatchError: The ranks' placeholders show that ranks differ.
            PayloadError: A payload arrived corrupt.
        """
        if ctx is None:
            return output
        with _ordinary_mode():
            return self._plugged().decompress(output, ctx)

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
        self.check_device(flat.device)
        if seed is None:
            key = self.instance.next_alone(self.settings.seed, _rank(), self._encodes)
            self._encodes += 1
        else:
            seed = check_integer("seed", seed, 0, 2**64 - 1)
            key = stream_key(seed, 0, 0, Use.ENCODE)
        flat = flat.detach().resolve_neg().contiguous()
        return self.encode_flat(flat, self.settings.quantized_part(flat.numel()), key)

    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the decoded tensor, of the length and dtype that was encoded.

        Raises:
            PayloadError: The payload is short, foreign or corrupt, or was encoded with other
                settings or another table version.
        """
        if not isinstance(payload, torch.Tensor) or payload.dtype != torch.uint8:
            raise PayloadError("payload: must be a uint8 tensor")
        header = payloads.read_header(payload.reshape(-1))
        return self.decode_sum([payload.reshape(-1)], header, 1.0)

    @functools.cached_property
    def fingerprint(self) -> int:
        """Return 32 bits of the scheme and all settings that must be equal on all ranks."""
        agreed = sorted((self.settings.shared() | self.scheme_settings()).items())
        return zlib.crc32(repr((__version__, self.name, agreed)).encode())

    # State and report ---------------------------------------------------------------------------

    def adopt(self, old: GradientCompressor, keep: bool) -> None:
        self.step, self._encodes, self.meter = old.step, old._encodes, old.meter
        self.instance = old.instance
        if self.residuals is not None and old.residuals is not None:
            self.residuals = self.residuals.loaded(old.residuals.state_dict())
        self._parts.adopt(old._parts, keep)
        if keep and old._second is not None and old._second.codec is not old:
            self._second = old._second  # with its table
            if self.settings.checksum != old.settings.checksum:
                second: Any = self._second.codec
                second.set(checksum=self.settings.checksum)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, as plain tensors and numbers.

        The state includes the stream of random numbers. Load it only into a compressor that
        replaces this one; two that are used side by side would draw the same numbers.

        With error feedback each rank has residuals of its own, as of the last complete step, and
        ECDQ counts the bits that each rank has sent since the last update. Then every rank must
        save and load its own state: ``torch.save(compressor.state_dict(),
        f"compressor-{hvd.rank()}.pt")``, or its entry of the list
        ``hvd.allgather_object(compressor.state_dict())``.
        """
        own = {"scheme": self.name, "step": self.step, "encodes": self._encodes}
        own |= self.instance.state_dict()
        changed = {"settings": dict(self._changed)} if self._changed else {}
        residuals = {} if self.residuals is None else self.residuals.state_dict()
        return own | changed | self._parts.state_dict() | residuals | self._second_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. A step in progress is given up.

        Settings that ``set`` or the schedule had changed come from the state. Residuals are matched
        by parameters' names. Residuals of another rank or number of ranks are dropped with a
        warning at the next step.

        Raises:
            ValueError: The state is of another scheme or incomplete; nothing has changed.
        """
        changed = states.mapping(state).get("settings", {})
        states.mapping(changed, "state: settings")
        if any(isinstance(value, torch.Tensor) for value in changed.values()):
            raise ValueError(f"state: settings must be plain values, not tensors: {changed!r}")
        if changed == self._changed:
            self.take_state(state)
            if self._session is not None:
                self._session.forget()
        else:
            new = self._changed_as(changed)
            new.instance = self.instance
            new.take_state(state)
            self._become(new)
        self._next, self._scheduled_at = None, -1

    def take_state(self, state: dict[str, Any]) -> None:
        """Load a state of these settings; schemes add their own entries."""
        self.check_state(state)
        step, encodes = states.whole(state, "step"), states.whole(state, "encodes")
        parts, second = self._parts.loaded(state), self._loaded_second(state)
        self.instance = self.instance.loaded(state.get("instance", {}))
        self.step, self._encodes, self._parts, self._second = step, encodes, parts, second
        if self.residuals is not None:
            self.residuals = self.residuals.loaded(state)
        elif "residuals" in state:
            logger.warning("error_feedback=None: the residuals of the loaded state are dropped")

    def _changed_as(self, changed: Any) -> GradientCompressor:
        try:
            return self._remade(changed)
        except (TypeError, ValueError) as error:
            raise ValueError(f"state: settings {changed!r} do not fit: {error}") from error

    def check_state(self, state: dict[str, Any], more: Sequence[str] = ()) -> None:
        """Raise ValueError unless ``state`` has this scheme, the same parts and all entries."""
        if states.mapping(state).get("scheme") != self.name:
            raise ValueError(f"state: is of scheme {state.get('scheme')!r}, not {self.name!r}")
        for entry in ("step", "encodes", *more):
            states.entry(state, entry)
        self._parts.loaded(state)
        self._loaded_second(state)
        check_residuals(state)

    def report(self) -> dict[str, float]:
        """Return what the last step sent, and its error; see monitor.StepMeter for the keys.

        table_version is that of the part that was fitted most often.
        """
        version = max(codec.table_version for codec in self.parts.values())
        return self.meter.report() | {"table_version": version}

    @property
    def layout(self) -> Layout | None:
        """Return which coordinate is sent in which group; read-only.

        It is None until this compressor serves an optimizer or a model whose gradients are known.
        """
        return None if self._session is None else self._session.layout

    @property
    def connection(self) -> Connection | None:
        """Return the connection to the optimizer or model that this compressor serves, or None."""
        return self._session

    def attach(self, connection: Connection) -> None:
        """Serve ``connection``, which ``set`` and ``load_state_dict`` notify from now on."""
        self._session = connection

    def close(self) -> None:
        """Release the optimizer and its gradients; the compressor can then serve another."""
        self._session = None

    def _plugged(self) -> Connection:
        session = self._session
        if session is not None:
            return session
        with _plugging:  # backward passes in several threads may begin at once
            if self._session is None:
                self._session = self.host.connect(self)
            return self._session

    def __repr__(self) -> str:
        return self._described

    @functools.cached_property
    def _described(self) -> str:
        settings = self.scheme_settings() | self.settings.shared()
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in settings.items())})"


def check_compressor(name: str, value: Any) -> GradientCompressor:
    """Return ``value`` if it is a compressor; raise ValueError otherwise."""
    if isinstance(value, type) and issubclass(value, GradientCompressor):
        scheme = value.__name__
        raise ValueError(f"{name}={scheme}: is a class; give an instance, {name}={scheme}(...)")
    if not isinstance(value, GradientCompressor):
        raise ValueError(f"{name}={value!r}: must be a compressor of hvd_adaptive")
    return value
