"""LeNet on MNIST with LocalSGD: ranks train alone, and average every few steps.

torchrun --nproc-per-node 2 examples/local_sgd.py
torchrun --nproc-per-node 2 examples/local_sgd.py --every 1 --momentum 0 --lr 1
torchrun --nproc-per-node 2 examples/local_sgd.py --fragments 2 --delay 2
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lenet import LeNet, read_images, split

from hvd_adaptive import ALQ, LocalSGD


def make_parser() -> argparse.ArgumentParser:
    """Flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=10, help="steps of a round (10)")
    parser.add_argument("--bits", type=int, default=4, help="of a code (4)")
    parser.add_argument("--momentum", type=float, default=0.5, help="of the outer SGD (0.5)")
    parser.add_argument("--lr", type=float, default=0.7, help="of the outer SGD (0.7)")
    parser.add_argument("--fragments", type=int, default=1, help="averaged in turn (1)")
    parser.add_argument("--delay", type=int, default=0, help="steps of a round in flight (0)")
    parser.add_argument("--steps", type=int, default=150)
    return parser


def main(words: list[str] | None = None) -> None:
    """Train and test."""
    parser = make_parser()
    args = parser.parse_args(words)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)  # so that all ranks begin with the same parameters
    train_set, test_set = split(*read_images())
    net = LeNet()
    try:
        optimizer = LocalSGD(
            torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
            every=args.every,
            compression=ALQ(bits=args.bits),
            momentum=args.momentum,
            lr=args.lr,
            fragments=args.fragments,
            delay=args.delay,
            named_parameters=net.named_parameters(),
        )
    except ValueError as error:  # a flag's value is not allowed
        parser.error(str(error))
    draw = torch.Generator().manual_seed(rank)
    for _ in range(args.steps):
        chosen = torch.randint(len(train_set), (32,), generator=draw)
        images, digits = (tensor[chosen] for tensor in train_set.tensors)
        optimizer.zero_grad()
        F.cross_entropy(net(images), digits).backward()
        optimizer.step()
    optimizer.finish()
    with torch.no_grad():
        images, digits = test_set.tensors
        accuracy = float((net(images).argmax(1) == digits).float().mean())
    if rank == 0:
        report = optimizer.report()
        print(
            f"accuracy {100 * accuracy:.2f}% after {report['rounds']} rounds, "
            f"{report['wire_bytes_per_step']:,.0f} bytes sent by a process per step"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
