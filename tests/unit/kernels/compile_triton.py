"""Launches every Triton kernel in a process without a GPU: each is compiled for compute capability
9.0, not run. Prints a line for each: its name, then what its PTX must not hold but does."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hvd_adaptive.kernels.eden import Levels
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.kernels.tables import kernel_table
from hvd_adaptive.kernels.triton import bucket as cuda_bucket
from hvd_adaptive.kernels.triton import checksum as cuda_checksum
from hvd_adaptive.kernels.triton import eden as cuda_eden
from hvd_adaptive.kernels.triton import levels as cuda_levels
from hvd_adaptive.kernels.triton import tables as cuda_tables
from hvd_adaptive.kernels.triton import uniforms as cuda_uniforms
from hvd_adaptive.levels.lloyd_max import normal_levels

# Products that are added without being rounded, and functions that are not rounded correctly.
FORBIDDEN = (
    "fma.rn.f32",
    "fma.rn.f64",
    "mad.f32",
    "div.full",
    "div.approx",
    "sqrt.approx",
    "rcp.approx",
    ".ftz",
)
# PTX of more characters takes ptxas many seconds; the longest here has four fifths.
LONGEST = 400_000


class NoGPU:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(folder: str) -> None:
    """Launches compile from now on, and print. What they leave in Triton's cache, for which
    ``folder`` is taken, cannot be run."""
    triton.knobs.cache.dir = folder
    driver.set_active(NoGPU())
    CUDABackend.make_cubin = lambda *args: b""  # PTX tells enough, in half the time
    run, seen = JITFunction.run, set()

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            flaws = [word for word in FORBIDDEN if word in kernel.asm["ptx"]]
            if len(kernel.asm["ptx"]) > LONGEST:
                flaws.append(f"{len(kernel.asm['ptx'])} characters")
            print(self.fn.__name__, *flaws)
        return kernel

    JITFunction.run = compiled


def tables() -> None:
    """In one launch and in two; each rule, way of packing and place of buckets. Codes of fixed
    width, whose loops are unrolled, take long to compile: few have them."""
    x = torch.ones(5000)
    positive = np.linspace(0, 1, 18) ** 1.1
    for magnitudes, symmetric, bucket, clip in (
        (np.array([0.1, 0.2, 0.5, 1.0]), True, 2048, None),
        (positive, False, 100, None),
        (np.append(0, 0.9 ** np.arange(8.0, -1, -1)), False, 5000, None),
        (np.array([0.0, 1.0]), False, 2560, 2.5),
    ):
        table = kernel_table(magnitudes, symmetric)
        scales = torch.zeros(-(-5000 // bucket))
        words = torch.zeros(table.packing.words(5000), dtype=torch.int32)
        cuda_tables.encode(x, scales, words, bucket, "l2", table, 3, clip)
        if bucket in (2048, 100):
            cuda_tables.decode_add([(scales, words)] * 2, bucket, table, 0.5, x.clone())
    cuda_tables.clipped(x, 100, 2.0)


def buckets() -> None:
    """The schemes whose buckets have levels of their own."""
    x = torch.ones(5000)
    levels, words = torch.zeros(5, 5), torch.zeros(448, dtype=torch.int32)
    cuda_bucket.round_codes(x, levels, words, 1024, 1)
    # Codes of a byte have the longest PTX: it takes as long as a third of all others.
    many = 256 if "HVD_ADAPTIVE_EVERY_CASE" in os.environ else 16
    codes = torch.zeros(packing_of(many).words(5000), dtype=torch.int32)
    cuda_bucket.round_codes(x, torch.zeros(5, many), codes, 1024, 1)
    cuda_bucket.decode_add([(levels, words)], 1024, 1.0, x.clone())


def integers() -> None:
    """Random integers of coordinates."""
    cuda_uniforms.uniforms(3000, 1024, 1, torch.device("cpu"))


def rotations() -> None:
    """EDEN: whole buckets and a partial one, few levels and many."""
    x = torch.ones(3000)
    for bits in (1, 5):
        levels, scales = Levels.of(normal_levels(bits)), torch.zeros(3)
        words = torch.zeros(packing_of(1 << bits).words(3008), dtype=torch.int32)
        cuda_eden.encode(x, scales, words, 1024, levels, 1, 2)
        cuda_eden.decode_add([(scales, words)] * 2, 1024, levels, 1, [2, 3], x.clone())


def levels() -> None:
    """The solvers of levels."""
    x = torch.ones(3000)
    cuda_levels.orq_levels(x, 1000, 129, None, 2)
    cuda_levels.mean_magnitudes(x, 1000, None)
    cuda_levels.symmetric_levels(x, 1000, None)
    cuda_levels.conditional_means(x, 1000, None, True)


def checksums() -> None:
    """Sealing a payload, and reading the checksums of several."""
    payload = torch.zeros(20000, dtype=torch.uint8)
    cuda_checksum.seal(payload, bytes(96), 1)
    cuda_checksum.checksums([payload, payload], [1, 2])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        compile_only(folder)
        for part in (tables, buckets, integers, rotations, levels, checksums):
            part()
