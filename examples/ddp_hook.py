"""LeNet on MNIST with DistributedDataParallel in Horovod's place; the same compressors, as a hook.

torchrun --nproc-per-node 2 examples/ddp_hook.py
torchrun --nproc-per-node 2 examples/ddp_hook.py --scheme none        # DDP's own allreduce
torchrun --nproc-per-node 2 examples/ddp_hook.py --scheme ecdq --bits 2 --exchange scatter_reduce
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lenet import LeNet, read_images, split
from torch.nn.parallel import DistributedDataParallel

import hvd_adaptive
from hvd_adaptive.ddp import CompressionState, compression_hook

EXPORTED = {name: getattr(hvd_adaptive, name) for name in hvd_adaptive.__all__}
SCHEMES = {
    name.lower(): value
    for name, value in EXPORTED.items()
    if inspect.isclass(value) and hasattr(value, "compress")
}


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["none", *sorted(SCHEMES)]
    parser.add_argument(
        "--scheme",
        choices=names,
        default="alq",
        metavar="NAME",
        help=f"one of {', '.join(names)} (alq)",
    )
    parser.add_argument("--bits", type=float, help="of a code, sign included; also fractions")
    travel = "how payloads travel (allgather up to 3 ranks, scatter_reduce beyond)"
    parser.add_argument("--exchange", help=travel)
    parser.add_argument(
        "--error-feedback",
        type=lambda text: text if text == "auto" else float(text),
        metavar="WEIGHT",
        help="of what earlier steps lost, above 0 to 1, or auto",
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process (32)")
    parser.add_argument("--bucket-cap-mb", type=float, default=25, help="of DDP's buckets (25)")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU, over gloo")
    args = parser.parse_args(words)
    try:
        args.compressor = make_compressor(args)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def main(words: list[str] | None = None) -> int:
    """Train and test."""
    args = parse(words)
    cuda = not args.no_cuda and torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    train_set, test_set = split(*read_images())
    net = LeNet().to(device)
    model = DistributedDataParallel(
        net, device_ids=[device] if cuda else None, bucket_cap_mb=args.bucket_cap_mb
    )
    state = None
    if args.compressor is not None:
        # The compressor: all that is new.
        state = CompressionState(args.compressor, net.named_parameters())
        model.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    draw, begin = torch.Generator().manual_seed(args.seed + rank), time.perf_counter()
    for step in range(args.steps):
        chosen = torch.randint(len(train_set), (args.batch_size,), generator=draw)
        images, digits = (tensor[chosen].to(device) for tensor in train_set.tensors)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}\tloss {loss.item():.4f}", flush=True)
    seconds = (time.perf_counter() - begin) / max(1, args.steps)

    weights = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(ranks)]
    dist.all_gather(everyone, weights)
    same = all(torch.equal(other, weights) for other in everyone)
    with torch.no_grad():
        images, digits = (tensor.to(device) for tensor in test_set.tensors)
        accuracy = float((net(images).argmax(1) == digits).float().mean())
    if rank == 0:
        print(
            f"accuracy {100 * accuracy:.2f}%, {1e3 * seconds:.1f} ms a step, parameters "
            f"{'equal' if same else 'DIFFER'} on {ranks} processes"
        )
        if state is not None and ranks > 1:
            report = state.report()
            print(
                f"{report['wire_bytes']:,} bytes sent by a process in a step, "
                f"{report['bits_per_coordinate']:.2f} bits per coordinate"
            )
    dist.destroy_process_group()
    return 0 if same else 1


def make_compressor(args: argparse.Namespace):
    """From the flags that were given; None for DDP's own allreduce."""
    if args.scheme == "none":
        return None
    given = {name: getattr(args, name) for name in ("bits", "exchange", "error_feedback")}
    if given["bits"] is not None and given["bits"].is_integer():
        given["bits"] = int(given["bits"])
    return SCHEMES[args.scheme](**{n: v for n, v in given.items() if v is not None})


if __name__ == "__main__":
    sys.exit(main())
