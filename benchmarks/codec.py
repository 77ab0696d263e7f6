"""Encode and decode-and-accumulate against memcpy, in one run, on one thread.

    python benchmarks/codec.py [--scheme ALQ] [--bits 2 3 4 8] [--norm l2] [--coordinates N]

Each round times memcpy, encode, decode-and-accumulate and the checksum one after another on fresh
random data; the medians over the rounds are printed as GB/s of float32 and as ratios to memcpy's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import hvd_adaptive
from hvd_adaptive.kernels import cpu

SCHEMES = ("ALQ", "AMQ", "NUQSGD", "QSGD")


def seconds(function: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(bits: int, args: argparse.Namespace) -> dict[str, float]:
    """Medians over the rounds for one width."""
    construct = getattr(hvd_adaptive, args.scheme)
    scheme = construct(bits=bits, bucket_size=args.bucket_size, norm=args.norm)
    flat = torch.empty(args.coordinates)
    copy, total = torch.empty_like(flat), torch.zeros_like(flat)
    body = torch.empty(scheme.body_bytes(args.coordinates), dtype=torch.uint8)
    words = body[: body.numel() // 4 * 4].view(torch.int32)
    actions: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copy.copy_(flat),
        "encode": lambda: scheme.encode_body(flat, body, 1),
        "decode": lambda: scheme.decode_bodies([body], [1], 1.0, total),
        "checksum": lambda: cpu.checksum(words, 0),
    }
    flat.normal_()
    if hasattr(scheme, "fit"):
        scheme.fit(flat[: 100 * args.bucket_size])
    for action in actions.values():
        action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in tqdm(range(args.rounds), desc=f"{bits} bits", leave=False):
        flat.normal_()
        for name, action in actions.items():
            times[name].append(seconds(action))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", choices=SCHEMES, default="ALQ")
    parser.add_argument("--coordinates", type=int, default=11_700_000)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 5, 6, 8])
    parser.add_argument("--bucket-size", type=int, default=8192)
    parser.add_argument("--norm", choices=("l2", "linf"), default="l2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gigabytes = 4 * args.coordinates / 1e9
    table = Table(
        title=f"{args.scheme}, {args.coordinates:,} coordinates, bucket {args.bucket_size}"
    )
    for column in ("bits", "memcpy GB/s", "encode GB/s", "/ memcpy", "decode+add GB/s", "/ memcpy",
                   "checksum / encode"):  # fmt: skip
        table.add_column(column, justify="right")
    results = {}
    for bits in args.bits:
        t = results[bits] = measure(bits, args)
        table.add_row(
            str(bits),
            f"{gigabytes / t['memcpy']:.1f}",
            f"{gigabytes / t['encode']:.2f}",
            f"{t['memcpy'] / t['encode']:.2f}",
            f"{gigabytes / t['decode']:.2f}",
            f"{t['memcpy'] / t['decode']:.2f}",
            f"{t['checksum'] / t['encode']:.3f}",
        )
    Console().print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(args), "seconds": results}, file, indent=1)


if __name__ == "__main__":
    main()
