"""LeNet on MNIST with Horovod, and a choice of gradient compression.

mpirun -np 4 python examples/mnist.py --compression alq --bits 3
horovodrun -np 4 python examples/mnist.py --compression fp16
python examples/mnist.py --demo               # float32, fp16 and ALQ side by side
python examples/mnist.py --paired-seeds 5     # what ALQ costs in accuracy, if anything
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

try:
    import horovod.torch as hvd
except ImportError as error:
    sys.exit(f"Horovod cannot be imported ({error}); build it with: hvd-adaptive install-horovod")

import flags
from compression import Traffic, make_compression, own_defaults
from lenet import LeNet, read_images, split
from progress import Progress

# What --demo and --paired-seeds train with, unless told otherwise.
DEMO_DEFAULTS = {
    "compression": "alq",
    "bits": 3,
    "batch_size": 32,
    "epochs": 6,
    "lr": 0.005,
    "momentum": 0.9,
    "update_steps": [0, 10, 30, 100],
    "test_interval": 16,
}


def make_parser() -> argparse.ArgumentParser:
    """Flags: Horovod's examples' own where they mean the same."""
    parser = flags.make_parser(__doc__, compression="none")
    train = parser.add_argument_group("training")
    train.add_argument("--batch-size", type=int, default=64, help="of each rank (64)")
    train.add_argument("--test-batch-size", type=int, default=250, help="of each rank (250)")
    train.add_argument("--epochs", type=int, default=10)
    train.add_argument("--lr", type=float, default=0.01, help="multiplied by the number of ranks")
    train.add_argument("--momentum", type=float, default=0.5)
    train.add_argument("--seed", type=int, default=42)
    train.add_argument("--repeats", type=int, default=1, help="train again with the next seeds")

    show = parser.add_argument_group("output")
    show.add_argument("--log-interval", type=int, default=10, help="steps between lines (10)")
    show.add_argument(
        "--test-interval",
        type=int,
        default=0,
        help="steps between tests; 0 (default) for one after each epoch",
    )
    show.add_argument(
        "--progress",
        choices=("auto", "bar", "lines", "none"),
        default="auto",
        help="auto: a bar where stderr is a terminal, else lines",
    )
    show.add_argument(
        "--monitor",
        type=Path,
        metavar="FOLDER",
        help="keep a log for `hvd-adaptive report FOLDER` there",
    )
    show.add_argument("--json", type=Path, help="write settings and results here")

    demo = parser.add_argument_group("comparisons (start horovodrun themselves, on the CPU)")
    demo.add_argument("--demo", action="store_true", help="train with float32, fp16 and ALQ")
    demo.add_argument(
        "--paired-seeds",
        type=int,
        default=0,
        metavar="N",
        help="train float32 and ALQ with N seeds each, compare",
    )
    demo.add_argument("--ranks", type=int, default=4)
    demo.add_argument("--launcher", choices=("auto", "mpi", "gloo"), default="auto")
    demo.add_argument("--output-dir", type=Path, default=Path("runs"))
    demo.add_argument(
        "--timeout",
        type=float,
        default=1800,
        metavar="SECONDS",
        help="of a training, until its ranks are killed (1800)",
    )
    return parser


def main() -> int | str:
    """Train, or compare; returns what sys.exit takes."""
    parser = make_parser()
    args = parser.parse_args()
    if args.demo or args.paired_seeds:
        from mnist_demo import compare

        parser.set_defaults(compression=DEMO_DEFAULTS["compression"])
        compression = parser.parse_args().compression
        parser.set_defaults(**own_defaults(DEMO_DEFAULTS, compression))
        return compare(parser.parse_args())
    args = flags.parse(parser)
    device = flags.start(args)
    # Horovod: one rank reads the images, the others get them from it.
    images, digits = torch.empty(5000, 784, dtype=torch.uint8), torch.empty(5000, dtype=torch.int64)
    if hvd.rank() == 0:
        images, digits = read_images()
    images = hvd.broadcast(images, root_rank=0, name="images")
    digits = hvd.broadcast(digits, root_rank=0, name="digits")
    data = split(images, digits)

    runs = [train(args, args.seed + i, data, device) for i in range(args.repeats)]
    if hvd.rank() == 0 and args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        settings |= {"ranks": hvd.size(), "torch": torch.__version__, "device": device.type}
        args.json.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1))
    # Horovod: one rank that fails ends all, so the results come first.
    hvd.barrier()
    return 0 if all(run["replicas_equal"] for run in runs) else "the ranks' parameters differ"


def train(
    args: argparse.Namespace,
    seed: int,
    data: tuple[TensorDataset, TensorDataset],
    device: torch.device,
) -> dict[str, Any]:
    """Train once; returns what --json tells of it."""
    torch.manual_seed(seed)
    train_set, test_set = data
    # Horovod: use DistributedSampler to partition the training and test data.
    sampler = DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=seed, drop_last=True
    )
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    test_part = torch.utils.data.Subset(test_set, range(hvd.rank(), len(test_set), hvd.size()))
    test_loader = DataLoader(test_part, batch_size=args.test_batch_size)
    if not len(loader):
        sys.exit(f"--batch-size {args.batch_size}: a rank has only {len(sampler)} images")

    model = LeNet().to(device)
    # Horovod: scale learning rate by the number of ranks.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    # Horovod: broadcast parameters & optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # Horovod: wrap optimizer with DistributedOptimizer; the compression is one argument.
    compression = make_compression(args, seed)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

    steps = len(loader) * args.epochs
    interval = args.test_interval or len(loader)
    traffic = Traffic(compression, model)
    progress = Progress(args, steps)
    curve, losses, seconds, step = [], [], 0.0, 0
    for epoch in range(args.epochs):
        model.train()
        # Horovod: set epoch to sampler for shuffling.
        sampler.set_epoch(epoch)
        for images, digits in loader:
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), digits.to(device))
            loss.backward()
            optimizer.step()
            seconds += time.perf_counter() - begin
            losses.append(loss.item())
            traffic.count(step)
            step += 1
            if step % interval == 0 or step == steps:
                test_loss, accuracy = test(model, test_loader, device)
                curve.append(
                    {
                        "step": step,
                        "epoch": step / len(loader),
                        "accuracy": accuracy,
                        "test_loss": test_loss,
                        "train_loss": average(sum(losses) / len(losses)),
                        "wire_bytes": traffic.wire_bytes,
                    }
                )
                losses.clear()
            progress.show(step, loss.item(), curve)
    progress.close()

    same = replicas_equal(model)
    if hvd.rank() == 0 and args.progress != "none":
        final = curve[-1]
        print(
            f"Test set: Average loss: {final['test_loss']:.4f}, "
            f"Accuracy: {100 * final['accuracy']:.2f}%, "
            f"parameters {'equal' if same else 'DIFFER'} on {hvd.size()} ranks"
        )
    return {
        "seed": seed,
        "accuracy": curve[-1]["accuracy"],
        "steps": steps,
        "seconds": seconds,
        "seconds_per_step": seconds / steps,
        "replicas_equal": same,
        "curve": curve,
    } | traffic.result()


def test(model: torch.nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Mean loss and accuracy over the whole test set, of which each rank has a part."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for images, digits in loader:
            scores, digits = model(images.to(device)), digits.to(device)
            right = (scores.argmax(1) == digits).sum().item()
            sums += torch.tensor(
                [F.cross_entropy(scores, digits, reduction="sum").item(), right, len(digits)]
            )
    model.train()
    # Horovod: add up over ranks; their parts may differ in size.
    loss, right, count = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
    return loss / count, right / count


def average(value: float) -> float:
    """Mean over ranks."""
    return hvd.allreduce(torch.tensor(value, dtype=torch.float64), name="average").item()


def replicas_equal(model: torch.nn.Module) -> bool:
    """Whether all ranks hold the same bits."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    # Horovod: gather one hash from each rank.
    own = torch.tensor([int.from_bytes(digest.digest()[:7], "little")])
    return bool((hvd.allgather(own, name="replicas") == own).all())


if __name__ == "__main__":
    sys.exit(main())
