"""What the stages of exchange="scatter_reduce" cost in accuracy and in bytes, without a network.

python benchmarks/second_stage.py [--methods "ALQ(bits=3|4)"] [--ranks 2 4 8 16]
                                  [--model resnet18] [--json FILE]

The laboratory's gradients (laboratory/gradients.py), tensors end to end, are quantised by each
rank and averaged; the average is quantised once more with every number of bits from 3 to one more
than the default (*), to which tables are fitted as in training. Errors are squared, relative to the
exact mean; added: by the second stage, as a share of the first one's. By default a bit more for
averages would lower the error by less than a bit more in the first stage, on two reference laws
(codec/second_stage.py); compare with ALQ(bits=4). "none" is the allgather. bits sent: by a rank,
for a coordinate, without headers: b (ranks - 1) by allgather, else (ranks - 1)/ranks of both
stages' bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from laboratory.gradients import Drawn
from laboratory.shapes import read_shapes
from tqdm import tqdm

from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.codec.second_stage import MOST_BITS, default_bits, make_second_stage
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.kernels.random import Use, stream_key
from hvd_adaptive.tools.methods import Method, parse
from hvd_adaptive.tools.output import print_table, script_parser, whole

FEWEST_BITS = 3
COLUMNS = ("method", "ranks", "second stage", "first error", "added", "error", "bits sent")


def main() -> int:
    """Measure, print, and write the figures."""
    options = _options()
    torch.set_num_threads(1)
    sizes = [shape for _, shape in read_shapes(options.model)]
    flat = [_flat(sizes, rank) for rank in tqdm(range(max(options.ranks)), "gradients")]
    rows = []
    for ranks in options.ranks:
        for method in tqdm(parse(options.methods), f"{ranks} ranks"):
            rows += list(_stages(method, flat[:ranks]))
    _print(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--methods", nargs="+", default=["ALQ(bits=3|4)"])
    parser.add_argument("--ranks", nargs="+", type=whole(2), default=[2, 4, 8, 16])
    parser.add_argument("--model", default="resnet18", help="resnet18, resnet50 or lstm")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _flat(sizes: list[tuple[int, ...]], rank: int) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in Drawn(sizes).gradients(rank, 0)])


def _stages(method: Method, flat: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
    """One row for the allgather, which has no second stage, and one for each of its bits."""
    codec, ranks = method.scheme().parts.default, len(flat)
    if hasattr(codec, "fit"):
        codec.fit(flat)
    exact = torch.stack(flat).mean(dim=0)
    average = torch.stack([_again(codec, g, rank) for rank, g in enumerate(flat)]).mean(dim=0)
    first = _square(average - exact)
    own = _bits(codec, average)
    row = {"method": method.label, "ranks": ranks, "first error": first / _square(exact)}
    yield row | {
        "second stage": "none",
        "added": 0.0,
        "error": row["first error"],
        "bits sent": own * (ranks - 1),
    }
    default = default_bits(codec, ranks)
    for bits in range(FEWEST_BITS, min(default + 1, MOST_BITS) + 1):
        second = make_second_stage(codec, ranks, bits).codec
        if hasattr(second, "fit"):
            second.fit(average)
        decoded = _again(second, average, ranks)
        yield row | {
            "second stage": f"{bits}{' *' if bits == default else ''}",
            "added": _square(decoded - average) / first,
            "error": _square(decoded - exact) / _square(exact),
            "bits sent": (own + _bits(second, average)) * (ranks - 1) / ranks,
        }


def _again(codec: Codec, values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return ``values`` as a receiver decodes them."""
    quantized = codec.settings.quantized_part(values.numel())
    payload = codec.payloads.encode(values, quantized, stream_key(seed, 0, 0, Use.ENCODE)).bytes
    return codec.payloads.sum([payload], read_header(payload), 1.0)


def _bits(codec: Codec, values: torch.Tensor) -> float:
    return 8 * codec.body_bytes(values.numel()) / values.numel()


def _square(values: torch.Tensor) -> float:
    return float(values.double().square().sum())


def _print(rows: list[dict[str, Any]]) -> None:
    table = [[_cell(row[name]) for name in COLUMNS] for row in rows]
    print_table(COLUMNS, table, texts=3)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
