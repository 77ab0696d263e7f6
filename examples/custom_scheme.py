"""A quantiser of one's own, in thirty lines, trained with Horovod.

mpirun -np 2 python examples/custom_scheme.py --error-feedback 0.5

Bytes: each bucket's largest magnitude is 127, every coordinate a signed byte, rounded at random so
that its mean is right. Payloads, checksums, fusion, both exchanges, error feedback, checkpoints and
reports come with ``Scheme``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from flags import parse, say, start, weight
from lenet import LeNet, read_images, split

from hvd_adaptive.custom import Scheme, Settings, in_buckets, uniforms


class Bytes(Scheme):
    """Signed bytes, and a float32 for each bucket."""

    name = "bytes"  # in every payload

    def __init__(self, **shared: Any) -> None:
        super().__init__(Settings.from_keywords("Bytes", shared))

    @property
    def alphabet(self) -> int:
        return 255

    def codec_settings(self) -> dict[str, Any]:
        return {}  # nothing but the bucket size, which payloads carry anyway

    def body_bytes(self, coordinates: int) -> int:
        return 4 * self.scales(coordinates) + coordinates

    def scales(self, coordinates: int) -> int:
        return max(1, -(-coordinates // self.settings.bucket_size))

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> None:
        rows = in_buckets(flat, self.settings.bucket_size)
        scales = rows.abs().amax(dim=1, keepdim=True) / 127
        scales = torch.where(scales.isfinite(), scales, torch.nan)  # the whole bucket, on all ranks
        codes = torch.floor(rows / scales.clamp(min=1e-38) + uniforms(rows, key))
        codes = codes.nan_to_num().clamp(-127, 127).to(torch.int8)
        at = 4 * scales.numel()
        body[:at].view(torch.float32).copy_(scales.view(-1))
        body[at:].view(torch.int8).copy_(codes.view(-1)[: flat.numel()])

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        at = 4 * self.scales(out.numel())
        for body in bodies:
            codes = in_buckets(body[at:].view(torch.int8).float(), self.settings.bucket_size)
            values = codes * body[:at].view(torch.float32)[:, None]
            out += values.view(-1)[: out.numel()]
        out *= factor


def make_bytes(args: argparse.Namespace, seed: int) -> Bytes:
    """Construct it with the flags that were given."""
    given = {name: getattr(args, name) for name in ("bucket_size", "error_feedback", "exchange")}
    return Bytes(seed=seed, **{name: value for name, value in given.items() if value is not None})


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train; returns the accuracy and bits per coordinate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bucket-size", type=int, help="coordinates that share one scale")
    parser.add_argument(
        "--error-feedback", type=weight, metavar="WEIGHT", help="above 0 to 1, or auto"
    )
    parser.add_argument("--exchange", help="how payloads travel")
    parser.add_argument("--no-cuda", action="store_true", help="run on the CPU")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank (32)")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=42)
    args = parse(parser, words, make_bytes)
    device = start(args)
    compression = make_bytes(args, args.seed)
    torch.manual_seed(args.seed)
    train_set, test_set = split(*read_images())
    model = LeNet().to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), args.lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    draw = torch.Generator().manual_seed(args.seed + hvd.rank())
    for step in range(args.steps):
        chosen = torch.randint(len(train_set), (args.batch_size,), generator=draw)
        images, digits = (tensor[chosen].to(device) for tensor in train_set.tensors)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            say(f"step {step}\tloss {loss.item():.4f}")
    with torch.no_grad():
        images, digits = (tensor.to(device) for tensor in test_set.tensors)
        accuracy = float((model(images).argmax(1) == digits).float().mean())
    bits = compression.report()["bits_per_coordinate"]
    say(f"accuracy {100 * accuracy:.2f}% with {bits:.2f} bits per coordinate")
    return {"accuracy": accuracy, "bits": bits}


if __name__ == "__main__":
    main()
    sys.exit(0)
