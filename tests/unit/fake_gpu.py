"""Tensors that say they are on a GPU, where there is none.

Their memory is the CPU's and Triton's kernels run in its interpreter, so results are real. What
would make the host wait for a GPU raises, and so does what CUDA would refuse: tensors of two
devices in one operation. Streams and events keep a log. Imported after triton_interpreter.

``quick_kernels`` are the CPU's on the same memory, for tests of what is around the kernels.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hvd_adaptive import kernels

if torch.cuda.is_available():
    pytest.skip("there is a GPU: nothing to pretend", allow_module_level=True)

CUDA = torch.device("cuda", 0)
# The host waits for what these return.
WAITING = {
    *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__complex__", "cpu"),
    *("numpy", "nonzero", "equal", "allclose", "bincount", "unique", "masked_select"),
    *("is_nonzero", "argwhere", "__contains__", "__array__"),
}
# Of these, results that stay on the GPU.
STAYING = {"nonzero", "bincount", "unique", "masked_select", "argwhere"}
# They may take tensors of both devices.
TRANSFERS = {"copy_", "to", "set_", "type_as"}


class Waited(AssertionError):
    """The host would have waited for the GPU."""


class OnGPU(torch.Tensor):
    """A tensor on the pretended GPU."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name != "__get__":
            return cls._called(function, name, args, kwargs or {})
        told = {"device": CUDA, "is_cuda": True, "is_cpu": False}
        name = getattr(function.__self__, "__name__", "")
        return told[name] if name in told else on_gpu(_plainly(function, args, {}))

    @classmethod
    def _called(cls, function, name, args, kwargs):
        gpu = GPU.current
        if name in WAITING:
            gpu.wait(name)
        if name == "copy_":
            return _copy(gpu, *args, **kwargs)
        if name == "to" and (device := _device_among(args[1:], kwargs)) is not None:
            return _moved(gpu, args, kwargs, device)
        if name == "repeat_interleave" and isinstance(args[1], torch.Tensor):
            gpu.wait(name)
        if name in ("__getitem__", "__setitem__"):
            _check_index(gpu, args[1])
        elif name not in TRANSFERS:
            _check_devices(name, [*_flat(args), *_flat(kwargs.values())])
        if isinstance(kwargs.get("device"), torch.device) or kwargs.get("device") == "cuda":
            assert torch.device(kwargs["device"]).type == "cuda", f"{name} to the CPU"
            kwargs = kwargs | {"device": "cpu"}
        result = _plainly(function, args, kwargs)
        return off_gpu(result) if name in WAITING - STAYING else on_gpu(result)


def _plainly(function, args, kwargs):
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def on_gpu(value):
    """A tensor's memory as the GPU's; tensors in tuples, too."""
    return _mapped(lambda tensor: tensor.as_subclass(OnGPU), value)


def off_gpu(value):
    """The same memory as a plain tensor: for a test to look at, and for the interpreter."""
    return _mapped(lambda tensor: tensor.as_subclass(torch.Tensor), value)


def _mapped(function, value):
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        made = [_mapped(function, part) for part in value]
        fields = getattr(type(value), "_make", None)
        return fields(made) if fields else type(value)(made)
    return value


def _flat(values) -> Iterator:
    for value in values:
        yield from _flat(value) if isinstance(value, tuple | list) else [value]


def _check_devices(name: str, values: list) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and not isinstance(value, OnGPU):
            # A number on the CPU is handed over with the launch.
            assert value.dim() == 0, f"{name} of tensors on the GPU and on the CPU"


def _check_index(gpu: GPU, index) -> None:
    for part in _flat([index]):
        if isinstance(part, torch.Tensor):
            if part.dtype in (torch.bool, torch.uint8):
                gpu.wait("indexing by a mask")
            elif not isinstance(part, OnGPU):
                gpu.wait("indexing by a CPU tensor")


def _device_among(args, kwargs) -> torch.device | None:
    found = [v for v in [*args, *kwargs.values()] if isinstance(v, torch.device | str)]
    others = [v for v in args if isinstance(v, torch.Tensor)]
    if others:
        return others[0].device
    return torch.device(found[0]) if found else None


def _moved(gpu: GPU, args, kwargs, device: torch.device):
    """tensor.to(device, ...) of a tensor on the GPU."""
    rest = [v for v in args[1:] if not isinstance(v, torch.device | str | torch.Tensor)]
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
    plain = _plainly(torch.Tensor.to, (args[0], *rest), kwargs) if rest or kwargs else args[0]
    if device.type == "cuda":
        return on_gpu(plain)
    gpu.wait("to(cpu)")
    return off_gpu(plain).clone()


def _copy(gpu: GPU, target, source, non_blocking=False):
    """target.copy_(source, non_blocking)."""
    if isinstance(target, OnGPU) != isinstance(source, OnGPU):
        host = source if isinstance(target, OnGPU) else target
        if not (non_blocking and host.untyped_storage().data_ptr() in gpu.pinned):
            gpu.wait("copy_ between the GPU and memory that is not pinned")
        gpu.copies.append((source.numel(), isinstance(target, OnGPU)))
    _plainly(torch.Tensor.copy_, (target, source), {})
    return target


class Stream:
    """Keeps what it was told to wait for."""

    numbers = itertools.count(1)

    def __init__(self, name: str = "", device: torch.device = CUDA) -> None:
        self.name, self.device, self.waits = name, device, []
        self.cuda_stream = next(self.numbers)

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)

    def synchronize(self) -> None:
        GPU.current.wait("a stream's synchronize")


class Event:
    """Waiting for it is waiting; unless it was asked for, it has not happened."""

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        GPU.current.wait("an event's synchronize", event=True)


class GPU(TorchFunctionMode):
    """The pretended GPU.

    waits: what the host waited for; allowed, where it raises otherwise, in ``waiting``.
    uploads_allowed: copies to the GPU may be waited for, as those of tables are, once.
    pinned: addresses of pinned memory.  copies: (numbers, to the GPU).
    """

    current: GPU

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.copies: list[tuple[int, bool]] = []
        self.pinned: dict[int, torch.Tensor] = {}
        self.allowed, self.events_allowed, self.uploads_allowed = False, True, False
        self.default = Stream("default")
        self.stream = self.default

    def wait(self, name: str, event: bool = False) -> None:
        if not (self.allowed or (event and self.events_allowed)):
            raise Waited(name)
        self.waits.append(name)

    def waiting(self):
        """Inside the host may wait."""
        return mock.patch.object(self, "allowed", True)

    def never_waiting(self):
        """Inside it may not even wait for events."""
        return mock.patch.object(self, "events_allowed", False)

    def on(self, stream: Stream):
        return mock.patch.object(self, "stream", stream)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "pin_memory":
            return self._pinned(args[0].clone())
        if name == "copy_" and any(isinstance(a, OnGPU) for a in args):
            return _copy(self, *args, **kwargs)
        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        if name == "to" and not isinstance(args[0], OnGPU):
            device = _device_among(args[1:], kwargs)
            if device is not None and device.type == "cuda":
                if not self.uploads_allowed:
                    self.wait("to(cuda) from memory that is not pinned")
                return on_gpu(args[0].clone())
            device = None
        there = device is not None and torch.device(device).type == "cuda"
        if there:
            assert name in ("empty", "zeros", "ones", "full", "arange", "tensor"), name
            kwargs["device"] = "cpu"
            if name == "tensor" and not isinstance(args[0], int | float):
                self.wait("torch.tensor of a list")
            return on_gpu(function(*args, **kwargs))
        made = function(*args, **kwargs)
        return self._pinned(made) if pinned else made

    def _pinned(self, made: torch.Tensor) -> torch.Tensor:
        self.pinned[made.untyped_storage().data_ptr()] = made  # kept: no other takes the address
        return made


@pytest.fixture(name="gpu")
def pretended(monkeypatch) -> Iterator[GPU]:
    """For one test."""
    from triton.runtime import interpreter

    made = GPU.current = GPU()
    call = interpreter.GridExecutor.__call__

    def launched(self, *args, **kwargs):
        with torch._C.DisableTorchFunction():
            return call(self, *off_gpu(args), **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    for name, replaced in {
        "current_stream": lambda device=None: made.stream,
        "default_stream": lambda device=None: made.default,
        "Event": Event,
        "Stream": lambda device: Stream(device=device),
        "stream": made.on,
        "device": lambda device: contextlib.nullcontext(),
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
        "synchronize": lambda device=None: made.wait("torch.cuda.synchronize"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, replaced)
    monkeypatch.setattr(OnGPU, "record_stream", lambda self, stream: None, raising=False)
    with made:
        yield made


class Quick:
    """The CPU's kernels of a subject, for tensors on the pretended GPU."""

    def __init__(self, module) -> None:
        self._module = module

    def __getattr__(self, name):
        function = getattr(self._module, name)

        def called(*args, **kwargs):
            with torch._C.DisableTorchFunction():
                return on_gpu(function(*off_gpu(args), **kwargs))

        return called


@pytest.fixture(name="quick_kernels")
def quick(monkeypatch) -> None:
    """For one test."""
    of_cpu = kernels.for_device

    def for_device(device, subject="tables"):
        module = of_cpu(torch.device("cpu"), subject)
        return Quick(module) if device.type == "cuda" else module

    monkeypatch.setattr(kernels, "for_device", for_device)
