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
ADAPTIVE = {
    name.lower(): value
    for name, value in vars(hvd_adaptive).items()
    if inspect.isclass(value) and issubclass(value, GradientCompressor)
}
OPTIONS = ("bits", "bucket_size", "tail", "update_steps")


def names() -> list[str]:
    """What --compression takes."""
    return [*STOCK, *sorted(ADAPTIVE)]


def make_compression(args: argparse.Namespace) -> Any:
    """What hvd.DistributedOptimizer takes as ``compression``.

    Raises TypeError or ValueError where the method has no such option or does not take its value.
    """
    options = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    if args.compression not in STOCK:
        return ADAPTIVE[args.compression](seed=args.seed, **options)
    if options:
        raise ValueError(f"{args.compression!r} takes none of {', '.join(options)}")
    return STOCK[args.compression]


class Traffic:
    """Counts what one rank sends, and notes level tables as they change."""

    def __init__(self, compression: Any, model: torch.nn.Module, ranks: int) -> None:
        self.compression = compression
        self.ranks = ranks
        self.parameters = list(model.parameters())
        self.coordinates = sum(p.numel() for p in self.parameters)
        self.steps = 0
        self.payload_bytes = 0.0
        self.wire_bytes = 0.0
        self.errors: list[float] = []
        self.tables: list[dict[str, Any]] = []
        self._note_table(None)

    def count(self, step: int) -> None:
        """After a step."""
        self.steps += 1
        report = getattr(self.compression, "report", self._stock_report)()
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

    def _stock_report(self) -> dict[str, float]:
        """Figures of Horovod's own methods: bytes of the gradients as they are allreduced, and
        2 (N - 1) / N of them on the wire, as a ring sends."""
        error = norm = payload = 0.0
        for parameter in self.parameters:
            gradient = parameter.grad
            sent, context = self.compression.compress(gradient)
            payload += sent.numel() * sent.element_size()
            if sent is not gradient:
                received = self.compression.decompress(sent, context)
                error += float((received - gradient).square().sum())
                norm += float(gradient.square().sum())
        return {
            "payload_bytes": payload,
            "wire_bytes": 2 * (self.ranks - 1) / self.ranks * payload,
            # Of the averaged gradient, which is already rounded to what can be sent: see below.
            "relative_error": error / norm if norm else 0.0,
        }

    def _note_table(self, step: int | None) -> None:
        version = getattr(self.compression, "table_version", None)
        levels = getattr(self.compression, "levels", None)
        if levels is None or (self.tables and self.tables[-1]["version"] == version):
            return
        self.tables.append({"step": step, "version": version, "levels": levels.tolist()})
