"""Encode and decode-and-accumulate of every scheme against memcpy, in one run.

Each round times memcpy, encode, decode-and-accumulate of one payload, and whole payloads with and
without a checksum, one after another on fresh random data; figures are medians over the rounds.
Adaptive tables and code books are fitted to the data first. Schemes with a lossless coder are
measured with each of ``codings`` that they allow.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import statistics
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from hvd_adaptive.codec.payloads import Payloads
from hvd_adaptive.options import Tuning
from hvd_adaptive.tools.methods import Method, read

BITS = tuple(range(2, 9))  # of table schemes
TABLE_SCHEMES = ("ALQ", "AMQ", "NUQSGD", "QSGD")
# What is measured, as tools.methods reads it; table schemes with each of ``Options.table_bits``.
CASES = (
    *(f"{name}(bits=3)" for name in TABLE_SCHEMES),
    "ECDQ(bits=0.5|1.0|2.0|3.0|5.0|8.0)",
    "EDEN(bits=1|2|3|4|8)",
    "DRIVE()",
    "TernGrad()",
    "TernGrad(clip=None)",
    "ORQ(levels=3|5|9|17|33)",
    "ORQ(levels=9, level_dtype='float16')",
    "ORQ(levels=9, solver='coordinate_descent')",
    "ORQ(levels=9, clip=2.5)",
    "LinearQuantile(levels=9)",
    "BinGrad()",
    "BinGrad(variant='biased')",
    "BinGrad(variant='biased', iterate=True)",
    "SignSGD()",
    "OneBitSGD()",
    "NaturalCompression()",
    "SparseSGD(density=0.01|0.1)",
    "QCS(gain=10|30|100)",
    "QCS(gain=10, estimator='mmse')",
)
NAMES = tuple(dict.fromkeys(text.partition("(")[0] for text in CASES))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a measurement.

    Args:
        schemes: among NAMES.
        bits: of all schemes that have bits; None for table_bits and those of CASES.
        table_bits: of table schemes.
        codings: among coding.codings.CODINGS.
        norm: of table schemes; None for each one's own.
        device: "cpu", or "cuda" for the current GPU. Schemes that encode on the host are left out
            there.
    """

    schemes: Sequence[str] = NAMES
    bits: Sequence[int | float] | None = None
    table_bits: Sequence[int] = BITS
    codings: Sequence[str] = ("fixed",)
    coordinates: int = 11_700_000
    bucket_size: int = 8192
    norm: str | None = None
    rounds: int = 15
    threads: int = 1
    device: str = "cpu"


def cases(options: Options) -> dict[str, Any]:
    """Return {label: scheme}."""
    made, device = {}, torch.device(options.device)
    codings = options.codings if device.type == "cpu" else ("fixed",)
    for method in _methods(options):
        shared: dict[str, Any] = {"bucket_size": options.bucket_size}
        if options.norm is not None and method.name in TABLE_SCHEMES:
            shared["norm"] = options.norm
        scheme = method.having(**shared).scheme()
        if device.type != "cpu" and scheme.parts.default.payloads.is_on_host(device):
            continue
        for coding in codings:
            if coding == "fixed":
                made[method.label] = scheme
            elif coding in scheme.parts.default.codings:
                coded = method.having(coding=coding)
                with contextlib.suppress(ValueError):  # tables that this coder does not code
                    made[coded.label] = coded.having(**shared).scheme()
    return made


def _methods(options: Options) -> Iterator[Method]:
    """Yield the methods of ``schemes``, with the given bits if they have bits."""
    for method in itertools.chain.from_iterable(map(read, CASES)):
        bits = options.bits or (options.table_bits if method.name in TABLE_SCHEMES else None)
        if method.name not in options.schemes:
            continue
        if bits and "bits" in method.keywords:
            yield from (method.having(bits=number) for number in bits)
        else:
            yield method


def run(options: Options) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (label, figures of ``measure``) of each case as soon as it is measured."""
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        for label, scheme in cases(options).items():
            yield label, measure(scheme.parts.default, label, options)
    finally:
        torch.set_num_threads(before)


def measure(codec: Any, label: str, options: Options) -> dict[str, float]:
    """Return medians over the rounds for one codec.

    Returns:
        bits: Bits per coordinate.
        encode, decode: Seconds of a body.
        sealed, bare: Seconds to make a payload with a checksum, and without one.
        checksum: Seconds by which the former exceeds the latter in the same round. Half of the
            rounds begin with each; the mean of both halves' medians counts. A value below 0 is
            noise.
    """
    device = torch.device(options.device)
    flat = torch.empty(options.coordinates, device=device)
    target, total = torch.empty_like(flat), torch.zeros_like(flat)
    flat.normal_()
    if hasattr(codec, "fit"):
        codec.fit(flat[: 100 * options.bucket_size])
    body = flat.new_empty(codec.body_bytes(options.coordinates), dtype=torch.uint8)
    first = _encoded(codec, flat, body)
    used, is_coded = first.numel(), codec.coder is not None and first.numel() < body.numel()
    # A first sample's body is decoded in every round: a later one's length may differ.
    received = body.new_zeros(-(-used // 8) * 8)
    received[:used] = first
    bare = without_checksum(codec)
    actions: dict[str, Callable[[], object]] = {
        "memcpy": lambda: target.copy_(flat),
        "encode": lambda: _encoded(bare, flat, body),
        "decode": lambda: _decoded(codec, received, is_coded, total),
        "sealed": lambda: codec.payloads.encode(flat, flat.numel(), 1),
        "bare": lambda: bare.payloads.encode(flat, flat.numel(), 1),
    }
    for action in actions.values():
        action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    clock = CLOCKS[options.device]
    order = list(actions.items())
    # The bar is shown on terminals only.
    for _ in tqdm(range(options.rounds), desc=label, leave=False, disable=None):
        flat.normal_()
        for name, action in order:
            times[name].append(clock(action))
        order.reverse()  # none of them always finds the caches as the same other one leaves them
    medians = {name: statistics.median(values) for name, values in times.items()}
    longer = [a - b for a, b in zip(times["sealed"], times["bare"], strict=True)]
    # The first of a pair finds the caches cold: each of the two is so in every second round.
    orders = [statistics.median(longer[place::2]) for place in range(min(2, len(longer)))]
    checksum = statistics.mean(orders)
    return medians | {"checksum": checksum, "bits": 8 * used / options.coordinates}


def without_checksum(codec: Any) -> Any:
    """Return the same codec, tables included, whose payloads carry no checksum."""
    bare = copy.copy(codec)
    bare.settings = replace(codec.settings, tuning=Tuning(checksum=False))
    bare.payloads = Payloads(bare)
    return bare


def _encoded(codec: Any, flat: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
    """Return a body as it travels. ``body`` is memory for a body of fixed length."""
    body = body[: codec.encode_body(flat, body, 1)]
    shorter = codec.coded_body(body, flat.numel())
    return body if shorter is None else shorter


def _decoded(codec: Any, body: torch.Tensor, is_coded: bool, total: torch.Tensor) -> None:
    """Add what a body holds to ``total``, and halve it, as for the average of two ranks."""
    if is_coded:
        body = codec.fixed_body(body, total.numel())
    codec.decode_bodies([body], [1], 0.5, total)


# Clock cycles for which the GPU is kept busy while the host queues what is timed.
AHEAD = 1_000_000


def _gpu_seconds(function: Callable[[], object]) -> float:
    """Return the GPU's seconds for what one call queues on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


CLOCKS: dict[str, Callable[[Callable[[], object]], float]] = {
    "cpu": functools.partial(timeit.timeit, number=1),
    "cuda": _gpu_seconds,
}
