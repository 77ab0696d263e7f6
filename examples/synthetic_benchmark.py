"""Horovod's synthetic benchmark, with a choice of gradient compression: images a second.

mpirun -np 4 python examples/synthetic_benchmark.py                          # ALQ, 3 bits
mpirun -np 4 python examples/synthetic_benchmark.py --compression none       # Horovod's float32
mpirun -np 4 python examples/synthetic_benchmark.py --model resnet50 --fp16-allreduce

On a CPU small images and batches (--image-size 64 --batch-size 4) leave communication a share.
"""

from __future__ import annotations

import statistics
import sys
import timeit

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from compression import make_compression
from flags import make_parser, parse, say, start
from resnet import MODELS


def main(words: list[str] | None = None) -> dict[str, float]:
    """Measure; returns images a second of all ranks, and bytes that a rank sends in a step."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank (8)")
    parser.add_argument("--image-size", type=int, default=64, help="width and height (64)")
    parser.add_argument("--num-warmup-batches", type=int, default=2, help="not timed (2)")
    parser.add_argument("--num-batches-per-iter", type=int, default=2, help="of a time (2)")
    parser.add_argument("--num-iters", type=int, default=3, help="times taken (3)")
    parser.add_argument("--seed", type=int, default=42)
    args = parse(parser, words)
    device = start(args)
    torch.manual_seed(args.seed)
    model = MODELS[args.model]().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compression = make_compression(args, args.seed)
    # Horovod: wrap optimizer with DistributedOptimizer; the compression is one argument.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    # Horovod: broadcast parameters & optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.manual_seed(args.seed + hvd.rank())
    data = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    target = torch.randint(1000, (args.batch_size,), device=device)

    def benchmark_step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
        compression.report()

    parameters = sum(p.numel() for p in model.parameters())
    say(
        f"Model: {args.model}, {parameters:,} parameters\nBatch size: {args.batch_size}\n"
        f"Ranks: {hvd.size()} on {device.type}\nCompression: {args.compression}"
    )
    timeit.timeit(benchmark_step, number=args.num_warmup_batches)
    rates = []
    for place in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        say(f"Iter #{place}: {rates[-1]:.1f} img/sec per rank")
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()
    sent = compression.report()["wire_bytes"]
    mean, deviation = statistics.mean(rates), statistics.pstdev(rates)
    say(
        f"Img/sec per rank: {mean:.1f} +-{1.96 * deviation:.1f}\n"
        f"Total img/sec on {hvd.size()} rank(s): {hvd.size() * mean:.1f} "
        f"+-{1.96 * hvd.size() * deviation:.1f}\n"
        f"Bytes sent by a rank in a step: {sent:,.0f}"
    )
    return {"images_per_second": hvd.size() * mean, "wire_bytes": sent, "parameters": parameters}


if __name__ == "__main__":
    main()
    sys.exit(0)
