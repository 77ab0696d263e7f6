"""Encode and decode-and-accumulate of every scheme against memcpy, in one run, on one thread.

    python benchmarks/codec.py [--schemes ALQ QSGD ...] [--bits 2 3 4 8] [--norm l2]

Each round times memcpy, encode, decode-and-accumulate of one payload and the payload's checksum one
after another on fresh random data; the medians over the rounds are printed as GB/s of float32 and
as ratios to memcpy's. Adaptive tables are fitted to the data first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import hvd_adaptive
from hvd_adaptive.kernels import cpu

BITS = tuple(range(2, 9))
TABLE_SCHEMES = ("ALQ", "AMQ", "NUQSGD", "QSGD")
# Schemes without bits and norm, by their keywords.
OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "TernGrad": ({}, {"clip": None}),
    "ORQ": (
        *({"levels": levels} for levels in (3, 5, 9, 17, 33)),
        {"levels": 9, "level_dtype": "float16"},
        {"levels": 9, "solver": "coordinate_descent"},
        {"levels": 9, "clip": 2.5},
    ),
    "LinearQuantile": ({"levels": 9},),
    "BinGrad": ({}, {"variant": "biased"}, {"variant": "biased", "iterate": True}),
    "SignSGD": ({},),
    "OneBitSGD": ({},),
    "NaturalCompression": ({},),
    "SparseSGD": ({"density": 0.01}, {"density": 0.1}),
    "QCS": ({"gain": 10}, {"gain": 30}, {"gain": 100}, {"gain": 10, "estimator": "mmse"}),
}


def cases(args: argparse.Namespace) -> dict[str, Any]:
    """Label -> scheme."""
    shared = {"bucket_size": args.bucket_size}
    made = {
        f"{name}(bits={bits})": getattr(hvd_adaptive, name)(bits=bits, norm=args.norm, **shared)
        for name in TABLE_SCHEMES
        for bits in args.bits
    }
    for name, choices in OTHERS.items():
        for own in choices:
            told = ", ".join(f"{keyword}={value!r}" for keyword, value in own.items())
            made[f"{name}({told})"] = getattr(hvd_adaptive, name)(**own, **shared)
    return {k: v for k, v in made.items() if type(v).__name__ in args.schemes}


def seconds(function: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(scheme: Any, label: str, args: argparse.Namespace) -> dict[str, float]:
    """Medians over the rounds for one scheme, in seconds, and its bits per coordinate."""
    flat = torch.empty(args.coordinates)
    copy, total = torch.empty_like(flat), torch.zeros_like(flat)
    flat.normal_()
    if hasattr(scheme, "fit"):
        scheme.fit(flat[: 100 * args.bucket_size])
    body = torch.empty(scheme.body_bytes(args.coordinates), dtype=torch.uint8)
    used = scheme.encode_body(flat, body, 1) or body.numel()
    # A first sample's body is decoded in every round: a later one's length may differ.
    received = torch.zeros(-(-used // 8) * 8, dtype=torch.uint8)
    received[:used] = body[:used]
    words = body[: used // 4 * 4].view(torch.int32)
    actions: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copy.copy_(flat),
        "encode": lambda: scheme.encode_body(flat, body, 1),
        "decode": lambda: scheme.decode_bodies([received], [1], 1.0, total),
        "checksum": lambda: cpu.checksum(words, 0),
    }
    for action in actions.values():
        action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in tqdm(range(args.rounds), desc=label, leave=False):
        flat.normal_()
        for name, action in actions.items():
            times[name].append(seconds(action))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians | {"bits": 8 * used / args.coordinates}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = (*TABLE_SCHEMES, *OTHERS)
    parser.add_argument("--schemes", choices=names, nargs="+", default=names)
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument("--coordinates", type=int, default=11_700_000)
    parser.add_argument("--bucket-size", type=int, default=8192)
    parser.add_argument("--norm", choices=("l2", "linf"), default="l2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gigabytes = 4 * args.coordinates / 1e9
    table = Table(
        title=f"{args.coordinates:,} coordinates, bucket {args.bucket_size}, norm {args.norm}",
        caption="GB/s of float32; ratios to memcpy; checksum's share of encoding",
    )
    table.add_column("scheme", overflow="fold")
    for column in ("bits", "memcpy", "encode", "ratio", "decode+add", "ratio", "checksum"):
        table.add_column(column, justify="right", no_wrap=True)
    results = {}
    for label, scheme in cases(args).items():
        t = results[label] = measure(scheme, label, args)
        table.add_row(
            label,
            f"{t['bits']:.3f}",
            f"{gigabytes / t['memcpy']:.1f}",
            f"{gigabytes / t['encode']:.2f}",
            f"{t['memcpy'] / t['encode']:.2f}",
            f"{gigabytes / t['decode']:.2f}",
            f"{t['memcpy'] / t['decode']:.2f}",
            f"{t['checksum'] / t['encode']:.3f}",
        )
    # Wider than what rich assumes where there is no terminal.
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(args), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
