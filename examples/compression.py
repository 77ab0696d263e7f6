"""Compression methods by name, and what they send."""

from __future__ import annotations

import argparse
import inspect
import math
from typing import Any

import horovod.torch as hvd
import torch

import hvd_adaptive
from hvd_adaptive.compressor import GradientCompressor

# Horovod's own.
STOCK = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
# What hvd_adaptive exports, by its lower-case name.
EXPORTED = {name: getattr(hvd_adaptive, name) for name in hvd_adaptive.__all__}
ADAPTIVE = {
    name.lower(): value
    for name, value in EXPORTED.items()
    if inspect.isclass(value) and issubclass(value, GradientCompressor)
}
OPTIONS = (
    "bits",
    "levels",
    "norm",
    "symmetric",
    "density",
    "gain",
    "bucket_size",
    "tail",
    "clip",
    "error_feedback",
    "update_steps",
    "coding",
    "exchange",
)


def names() -> list[str]:
    """What --compression takes."""
    return [*STOCK, *sorted(ADAPTIVE)]


def own_defaults(defaults: dict[str, Any], compression: str) -> dict[str, Any]:
    """Return the defaults without keywords that the scheme does not have."""
    scheme = ADAPTIVE.get(compression)
    known = inspect.signature(scheme).parameters if scheme is not None else {}
    return {k: v for k, v in defaults.items() if k not in OPTIONS or k in known}


def make_compression(args: argparse.Namespace, seed: int, **more: Any) -> Any:
    """What hvd.DistributedOptimizer takes as ``compression``.

    more: keywords of hvd_adaptive's compressors alone, beyond those of the flags.

    Raises TypeError or ValueError where the method has no such option or does not take its value.
    """
    options = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    if getattr(args, "monitor", None) is not None:
        options["monitor"] = hvd_adaptive.Monitor(args.monitor, every=1)
    if args.compression not in STOCK:
        return ADAPTIVE[args.compression](seed=seed, **options, **more)
    if options:
        raise ValueError(f"{args.compression!r} takes none of {', '.join(options)}")
    return Counted(STOCK[args.compression])


class Counted:
    """One of Horovod's own compressors, with a ``report()`` as hvd_adaptive's have."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock
        self._reset()

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """As the stock compressor does, and count."""
        sent, context = self.stock.compress(tensor)
        self.payload_bytes += sent.numel() * sent.element_size()
        # Some coordinates are enough for an estimate of the error.
        sample = tensor.detach().reshape(-1)[:8192]
        rounded = sent.detach().reshape(-1)[:8192].to(sample.dtype)
        self.squared_error += float((rounded - sample).square().sum())
        self.squared_norm += float(sample.square().sum())
        return sent, context

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """As the stock compressor does."""
        return self.stock.decompress(tensor, context)

    def report(self) -> dict[str, float]:
        """Of the gradients since the last report; a ring sends them 2 (N - 1) / N times."""
        norm = self.squared_norm
        report = {
            "payload_bytes": self.payload_bytes,
            "wire_bytes": 2 * (hvd.size() - 1) / hvd.size() * self.payload_bytes,
            "relative_error": self.squared_error / norm if norm else math.nan,
        }
        self._reset()
        return report

    def _reset(self) -> None:
        self.payload_bytes, self.squared_error, self.squared_norm = 0, 0.0, 0.0


class Traffic:
    """Counts what one rank sends, and notes level tables as they change."""

    def __init__(self, compression: Any, model: torch.nn.Module) -> None:
        self.compression = compression
        self.coordinates = sum(p.numel() for p in model.parameters())
        self.steps = 0
        self.payload_bytes = 0.0
        self.wire_bytes = 0.0
        self.errors: list[float] = []
        self.tables: list[dict[str, Any]] = []
        self._note_table(None)

    def count(self, step: int) -> None:
        """After a step."""
        self.steps += 1
        report = self.compression.report()
        self.payload_bytes += report["payload_bytes"]
        self.wire_bytes += report["wire_bytes"]
        if math.isfinite(report["relative_error"]):
            self.errors.append(report["relative_error"])
        self._note_table(step)

    def result(self) -> dict[str, Any]:
        """Means over the steps; ``tables`` are [{step, version, levels}], the first unfitted."""
        payload = self.payload_bytes / max(self.steps, 1)
        return {
            "coordinates": self.coordinates,
            "uncompressed_bytes": 4 * self.coordinates,
            "payload_bytes": payload,
            "wire_bytes": self.wire_bytes / max(self.steps, 1),
            "bits_per_coordinate": 8 * payload / self.coordinates,
            "relative_error": sum(self.errors) / len(self.errors) if self.errors else None,
            "tables": self.tables,
        }

    def _note_table(self, step: int | None) -> None:
        levels = getattr(self.compression, "levels", None)
        if levels is None:
            return
        version = self.compression.report()["table_version"]
        if self.tables and self.tables[-1]["version"] == version:
            return
        self.tables.append({"step": step, "version": version, "levels": levels.tolist()})
