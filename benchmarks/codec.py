"""Encode and decode-and-accumulate of every scheme against memcpy, in one run.

    python benchmarks/codec.py [--schemes ALQ QSGD ...] [--bits 2 3 4 8] [--norm l2]
                               [--codings fixed huffman] [--threads 1]

Each round times memcpy, encode, decode-and-accumulate of one payload and the payload's checksum one
after another on fresh random data; the medians over the rounds are printed as GB/s of float32 and
as ratios to memcpy's. Adaptive tables and code books are fitted to the data first. Schemes with a
lossless coder are measured with each of ``--codings`` that they allow.
"""

from __future__ import annotations

import argparse
import contextlib
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
from hvd_adaptive.coding.header import CODINGS
from hvd_adaptive.kernels import cpu

BITS = tuple(range(2, 9))
TABLE_SCHEMES = ("ALQ", "AMQ", "NUQSGD", "QSGD")
# Schemes without bits and norm, by their keywords.
OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "ECDQ": tuple({"bits": bits} for bits in (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)),
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
    made = {k: v for k, v in made.items() if type(v).__name__ in args.schemes}
    if "fixed" in args.codings:
        return made | coded(made, args)
    return coded(made, args)


def coded(made: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The same schemes with each lossless coder that they allow."""
    again = {}
    for coding in [coding for coding in args.codings if coding != "fixed"]:
        for label, scheme in made.items():
            if coding not in scheme.codings:
                continue
            told = f"{label[:-1]}{'' if label.endswith('()') else ', '}coding={coding!r})"
            keywords = scheme._keywords | {"coding": coding}
            with contextlib.suppress(ValueError):  # tables that this coder does not code
                again[told] = type(scheme)(**keywords)
    return again


def encoded(scheme: Any, flat: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
    """A body as it would travel; ``body`` is room for a fixed one."""
    body = body[: scheme.encode_body(flat, body, 1)]
    shorter = scheme.coded_body(body, flat.numel())
    return body if shorter is None else shorter


def decoded(scheme: Any, body: torch.Tensor, is_coded: bool, total: torch.Tensor) -> None:
    """Add what a body holds to ``total``."""
    if is_coded:
        body = scheme.fixed_body(body, total.numel())
    scheme.decode_bodies([body], [1], 1.0, total)


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
    first = encoded(scheme, flat, body)
    used, is_coded = first.numel(), scheme.coder is not None and first.numel() < body.numel()
    # A first sample's body is decoded in every round: a later one's length may differ.
    received = torch.zeros(-(-used // 8) * 8, dtype=torch.uint8)
    received[:used] = first
    words = body[: used // 4 * 4].view(torch.int32)
    actions: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copy.copy_(flat),
        "encode": lambda: encoded(scheme, flat, body),
        "decode": lambda: decoded(scheme, received, is_coded, total),
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
    parser.add_argument("--codings", choices=CODINGS, nargs="+", default=list(CODINGS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--coordinates", type=int, default=11_700_000)
    parser.add_argument("--bucket-size", type=int, default=8192)
    parser.add_argument("--norm", choices=("l2", "linf"), default="l2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
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
