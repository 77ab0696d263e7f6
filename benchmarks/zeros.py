"""What exact zeros cost schemes without a level 0: bits, and time to encode and to decode.

    python benchmarks/zeros.py [--methods "EDEN(bits=1|2)" ...] [--coordinates N] [--rounds N]

A vector of normal coordinates has no zeros; 1 % or half of its coordinates are zero, independently;
or half of its rows of 64. Each is made a whole payload, and decoded, with ``keep_zeros=True`` and
False. Times are the processor's, medians over rounds in which memcpy, both encoders and both
decoders take turns, in milliseconds for a million coordinates. error: squared, relative to the
vector's own square.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.tools.methods import Method, parse
from hvd_adaptive.tools.output import print_table, script_parser, whole

METHODS = (
    "SignSGD()",
    "ALQ(bits=3, symmetric=True)",
    "EDEN(bits=1)",
    "EDEN(bits=2)",
    "ECDQ(bits=2)",
    "QCS()",
    "ORQ()",
)
ROW = 64
PATTERNS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "none": lambda n, draw: torch.zeros(n, dtype=torch.bool),
    "1 %": lambda n, draw: torch.rand(n, generator=draw) < 0.01,
    "50 %": lambda n, draw: torch.rand(n, generator=draw) < 0.5,
    "half of the rows": lambda n, draw: (
        torch.rand(n // ROW + 1, generator=draw) < 0.5
    ).repeat_interleave(ROW)[:n],
}
COLUMNS = ("method", "zeros", "bits\nkept", "bits\nrounded", "error\nkept", "error\nrounded")
TIMES = ("memcpy", "encode\nkept", "encode\nrounded", "decode\nkept", "decode\nrounded")


def main() -> int:
    """Measure and print."""
    parser = script_parser(__doc__)
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--coordinates", type=whole(1), default=4_000_000)
    parser.add_argument("--rounds", type=whole(1), default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(method, zeros) for method in parse(args.methods) for zeros in PATTERNS]
    rows = [row(*case, args.coordinates, args.rounds) for case in tqdm(cases)]
    print_table((*COLUMNS, *TIMES), rows, texts=2)
    return 0


def row(method: Method, zeros: str, coordinates: int, rounds: int) -> list[str]:
    """Return a line of the table."""
    draw = torch.Generator().manual_seed(1)
    flat = torch.randn(coordinates, generator=draw)
    flat[flat == 0] = 1.0  # of four million, about one
    flat[PATTERNS[zeros](coordinates, draw)] = 0.0
    copy, values = torch.empty_like(flat), torch.empty_like(flat)
    actions: list[Callable[[], object]] = [lambda: copy.copy_(flat)]
    bits, errors, decoders = [], [], []
    for keep in (True, False):
        scheme = method.having(keep_zeros=keep).scheme()
        if hasattr(scheme, "fit"):
            scheme.fit(flat[:1_000_000])
        codec, payload = scheme.parts.default, scheme.encode(flat, seed=1)
        frame = read_header(payload)
        actions.append(lambda codec=codec: codec.payloads.encode(flat, coordinates, 1).bytes)
        decoders.append(
            lambda codec=codec, payload=payload, frame=frame: codec.payloads.sum_into(
                [payload], frame, 0.5, values, values[:0]
            )
        )
        error = (scheme.decode(payload) - flat).square().sum() / flat.square().sum()
        bits.append(f"{8 * payload.numel() / coordinates:.3f}")
        errors.append(f"{float(error):.3g}")
    times = medians([*actions, *decoders], rounds)
    return [method.label, zeros, *bits, *errors, *(f"{1e9 * t / coordinates:.2f}" for t in times)]


def medians(actions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median seconds of each action; they take turns."""
    taken: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds + 1):  # the first round is not counted
        for action, own in zip(actions, taken, strict=True):
            begin = time.thread_time()
            action()
            own.append(time.thread_time() - begin)
    return [statistics.median(own[1:]) for own in taken]


if __name__ == "__main__":
    sys.exit(main())
