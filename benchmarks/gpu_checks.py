"""What benchmarks/gpu.py compares with plain torch on the CPU, bit for bit."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hvd_adaptive
from hvd_adaptive import kernels
from hvd_adaptive.kernels import random
from hvd_adaptive.tools.bench import codec

SEED = 20
BITS = (2, 3, 4, 8)
# Bucket sizes of ``equal``, and coordinates that leave a partial bucket of each.
SIZES = ((1000, 20_011), (8192, 30_000), (7, 200))
# Schemes that take no shorter buckets, in these checks.
LEAST = {"QCS": 8192, "ECDQ": 1000, "EDEN": 8192, "DRIVE": 8192}


def sample(n: int, device: torch.device, seed: int = SEED) -> torch.Tensor:
    """Gaussian, with a bucket's worth of zeros, huge and tiny numbers."""
    flat = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    flat[n // 2 : n // 2 + n // 10] = 0
    flat[n // 3], flat[n // 4] = 1e30, 1e-40
    return flat.to(device)


@contextmanager
def plain_torch() -> Iterator[None]:
    """CPU tensors go to the reference kernels."""
    of_device = kernels.for_device

    def for_device(device: torch.device, subject: str = "tables") -> Any:
        return (
            kernels.module("reference", subject)
            if device.type == "cpu"
            else of_device(device, subject)
        )

    kernels.for_device = for_device
    try:
        yield
    finally:
        kernels.for_device = of_device


def equal(arguments: argparse.Namespace) -> dict[str, Any]:
    """Case -> "equal", or what differs."""
    told: dict[str, Any] = {}
    with plain_torch():
        for bucket, n in SIZES:
            for label, scheme in cases(bucket).items():
                own = sample(n, torch.device("cpu"))
                own[0] = torch.nan if n > 10_000 else 0.5
                case = f"{label}, bucket {bucket}"
                try:
                    told[case] = compared(scheme, own, arguments.device)
                except ModuleNotFoundError as error:  # a scheme may need what is not installed
                    told[case] = f"left out: {error}"
                except Exception as error:  # the other cases are still worth their time
                    told[case] = f"failed: {error!r}"
    right = ("equal", "left out")
    differ = [case for case, result in told.items() if not result.startswith(right)]
    return told | {"differ": differ}


def cases(bucket: int) -> dict[str, Any]:
    """Return the schemes that can have such buckets, and are encoded on the device."""
    names = [name for name in codec.NAMES if name not in LEAST or bucket >= LEAST[name]]
    options = codec.Options(
        schemes=names, table_bits=BITS, codings=("fixed",), bucket_size=bucket, device="cuda"
    )
    return codec.cases(options)


def compared(scheme: Any, flat: torch.Tensor, device: torch.device) -> str:
    """Of one scheme's payload and its values."""
    wanted, found = scheme.encode(flat, seed=SEED), scheme.encode(flat.to(device), seed=SEED)
    if not torch.equal(wanted, found.cpu()):
        return f"payload: {int((wanted != found.cpu()).sum())} of {wanted.numel()} bytes differ"
    values, on_device = scheme.decode(wanted), scheme.decode(found).cpu()
    same = torch.equal(values.view(torch.int32), on_device.view(torch.int32)) or bool(
        ((values == on_device) | (values.isnan() & on_device.isnan())).all()
    )
    return "equal" if same else "decoded values differ"


def large(arguments: argparse.Namespace) -> dict[str, Any]:
    """The last buckets of a group beyond 32-bit indices: their scales, codes and values are those
    of a small group with the keys that belong to them."""
    bucket, tail = 8192, 3 * 8192 + 1234
    scheme = hvd_adaptive.ALQ(bits=3, bucket_size=bucket)
    table = scheme.parts.default.table.kernel
    # The codes from there on begin with a word of their own.
    whole = math.lcm(bucket, 32 * table.packing.digits)
    begin = arguments.beyond // whole * whole
    n, device = begin + tail, arguments.device
    flat = torch.randn(n, device=device)
    scales = torch.empty(-(-n // bucket), device=device)
    words = torch.empty(table.packing.words(n), dtype=torch.int32, device=device)
    ops, key = kernels.for_device(device), random.stream_key(SEED)
    ops.encode(flat, scales, words, bucket, "l2", table, key)
    own = flat[begin:].cpu().clone()
    ops.decode_add([(scales, words)], bucket, table, 1.0, flat, False)
    # bucket_key(key, b) counts from the key on.
    shifted = (key + begin // bucket * random.GOLDEN64) & random.MASK64
    wanted = (
        torch.empty(-(-tail // bucket)),
        torch.empty(table.packing.words(tail), dtype=torch.int32),
    )
    reference = kernels.module("reference", "tables")
    reference.encode(own, *wanted, bucket, "l2", table, shifted)
    values = torch.empty(tail)
    reference.decode_add([wanted], bucket, table, 1.0, values, False)
    pairs = {
        "scales": (wanted[0], scales[begin // bucket :]),
        "codes": (wanted[1], words[table.packing.words(begin) :]),
        "values": (values, flat[begin:]),
    }
    same = {name: torch.equal(a, b.cpu()) for name, (a, b) in pairs.items()}
    return {"coordinates": n, "equal": all(same.values())} | same
