"""Vectors of every kind, and level tables, on which kernels are compared bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from unit_oracles import word_count

from hvd_adaptive import kernels
from hvd_adaptive.kernels import hadamard
from hvd_adaptive.kernels.tables import KernelTable, kernel_table


def table_of(bits: int, symmetric: bool, kind: str = "uneven"):
    """uneven: random gaps; crowded: levels over 30 octaves; exponential; uniform."""
    count = 1 << (bits - 1)
    generator = np.random.default_rng(bits)
    if kind == "uneven":
        magnitudes = np.cumsum(generator.uniform(0.01, 1, count))
        magnitudes /= magnitudes[-1]
    elif kind == "exponential":
        magnitudes = 0.9 ** np.arange(count - 1.0, -1, -1)
    elif kind == "crowded":
        magnitudes = 2.0 ** np.linspace(-30, 0, count)
    else:
        magnitudes = np.linspace(1, 2 * count - 1, count) / (2 * count - 1)
    if not symmetric and kind == "uniform":
        magnitudes = np.linspace(0, 1, count)
    elif not symmetric:
        magnitudes[0] = 0
    return kernel_table(magnitudes, symmetric)


def ordinary(n: int, generator: np.random.Generator) -> np.ndarray:
    return generator.standard_normal(n)


def heavy(n: int, generator: np.random.Generator) -> np.ndarray:
    return generator.standard_normal(n) * np.exp(4 * generator.standard_normal(n))


def zeros(n: int, generator: np.random.Generator) -> np.ndarray:
    return np.zeros(n)


def signed_zeros(n: int, generator: np.random.Generator) -> np.ndarray:
    x = generator.standard_normal(n)
    x[generator.random(n) < 0.5] = -0.0
    x[: n // 3] = -0.0
    return x


def with_nan(n: int, generator: np.random.Generator) -> np.ndarray:
    x = generator.standard_normal(n)
    x[n // 2 : n // 2 + 1] = np.nan
    return x


def with_infinity(n: int, generator: np.random.Generator) -> np.ndarray:
    x = generator.standard_normal(n)
    x[-1:] = -np.inf
    return x


def denormal(n: int, generator: np.random.Generator) -> np.ndarray:
    return generator.standard_normal(n) * 1e-40


def near_denormal(n: int, generator: np.random.Generator) -> np.ndarray:
    return generator.standard_normal(n) * 3e-38


def enormous(n: int, generator: np.random.Generator) -> np.ndarray:
    return np.where(generator.random(n) < 0.5, -1e38, 1e38)


def constant(n: int, generator: np.random.Generator) -> np.ndarray:
    return np.full(n, -0.3)


def one_outlier(n: int, generator: np.random.Generator) -> np.ndarray:
    x = 1e-9 * generator.standard_normal(n)
    x[n // 3 : n // 3 + 1] = 7e8
    return x


KINDS = (
    ordinary,
    heavy,
    zeros,
    signed_zeros,
    with_nan,
    with_infinity,
    denormal,
    near_denormal,
    enormous,
    constant,
    one_outlier,
)


def vector(kind, n: int, seed: int = 0) -> torch.Tensor:
    with np.errstate(over="ignore"):
        return torch.from_numpy(kind(n, np.random.default_rng([seed, n])).astype(np.float32))


def encoded(
    kernels: Any,
    flat: torch.Tensor,
    bucket: int,
    norm: str,
    table: KernelTable,
    key: int,
    clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and words; what the kernels leave unwritten is seen."""
    scales = flat.new_full((-(-flat.numel() // bucket),), -1.0)
    words = flat.new_full((word_count(flat.numel(), table.alphabet),), 0x555, dtype=torch.int32)
    kernels.encode(flat, scales, words, bucket, norm, table, key, clip)
    return scales.cpu(), words.cpu()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN; +0 and -0 differ."""
    x, y = a.numpy().copy(), b.numpy().copy()
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    x[nan_x], y[nan_y] = 1.5, 1.5
    return np.array_equal(nan_x, nan_y) and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def placed(backend: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """On the device where a backend's kernels are tested; the test is skipped if there is none."""
    if backend != "triton":
        return list(tensors)
    return pytest.importorskip("triton_interpreter").moved(*tensors)


def hadamard_matrix(order: int) -> np.ndarray:
    """Sylvester's matrix times a base, as kernels/hadamard.py says."""
    base = hadamard.base_order(order)
    return np.kron(scipy.linalg.hadamard(order // base, np.int8), hadamard.base(base))


@contextlib.contextmanager
def served_by(backend: str) -> Iterator[None]:
    """That backend serves tensors of every device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_backend", lambda *_: backend)
        yield


def agree(codec: Any, flat: torch.Tensor, key: int, backend: str = "numba") -> None:
    """The backend makes the reference's bodies, with two keys, and their sum."""
    keys = key, key ^ 5
    made: list[list[torch.Tensor]] = []
    for one in ("reference", backend):
        made.append([])
        for own in keys:
            body = torch.full((codec.body_bytes(flat.numel()),), 0x55, dtype=torch.uint8)
            with served_by(one):
                size = codec.encode_body(flat, body, own)
            if isinstance(size, int):  # up to 7 zeros follow a body whose length varies
                body = torch.cat([body[:size], body.new_zeros(-size % 8)])
            made[-1].append(body)
    assert all(map(torch.equal, *made))
    add_alike(codec, made[0], keys, flat.numel(), backend)


def add_alike(
    codec: Any,
    bodies: Sequence[torch.Tensor],
    keys: Sequence[int],
    count: int,
    backend: str = "numba",
) -> None:
    """The backend adds the bodies to what is there as the reference does."""
    sums = [torch.linspace(-1, 1, count) for _ in range(2)]
    for one, out in zip(("reference", backend), sums, strict=True):
        with served_by(one):
            codec.decode_bodies(bodies, keys, 1 / 3, out)
    assert same_bits(*sums)


def add_hostile_bodies_alike(codec: Any, at: int, backend: str = "numba") -> None:
    """Of buckets of 64, with the highest codes and with any scales, from byte ``at`` on."""
    body = torch.full((codec.body_bytes(300),), 255, dtype=torch.uint8)
    body[at : at + 20].view(torch.float32)[:] = torch.tensor([np.nan, np.inf, -1.0, 3e38, 0.0])
    add_alike(codec, [body], [1], 300, backend)
