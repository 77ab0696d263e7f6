r"""LeNet on MNIST with elastic Horovod: workers come and go, training goes on, and can be stopped.

horovodrun --gloo -np 2 --min-np 1 --network-interfaces lo \
    --host-discovery-script ./hosts.sh python examples/elastic.py
mpirun -np 2 python examples/elastic.py --checkpoint run.pt     # again after a stop: goes on

The discovery script is executable, and prints a line "host:slots" for each host that there is, such
as "localhost:2". Without --network-interfaces, horovodrun starts no worker, and prints nothing,
until there are two hosts whose interfaces it can compare. On one host, name lo; on several, the
interface that they share. slurm/elastic.sh uses all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from compression import make_compression
from flags import make_parser, parse, say, start
from lenet import LeNet, read_images, split
from torch.utils.data import DataLoader, TensorDataset


def parse_words(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank (32)")
    parser.add_argument("--lr", type=float, default=0.01, help="whatever the number of ranks")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--commit-interval",
        type=int,
        default=5,
        metavar="STEPS",
        help="between commits and looks for the stop file (5)",
    )
    parser.add_argument("--checkpoint", type=Path, help="where to save, and what to go on from")
    parser.add_argument("--stop-file", type=Path, help="once it is there, save and end")
    parser.add_argument("--json", type=Path, help="write the result here")
    return parse(parser, words)


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Train until all epochs are done or the stop file is there; returns how far that was."""
    args = parse_words(words)
    print("a worker has started, and waits for the others", flush=True)
    device = start(args)
    torch.manual_seed(args.seed)
    train_set, test_set = split(*read_images())
    model = LeNet().to(device)
    # Elastic Horovod: workers that come later ask this compressor, through TorchState, for tables.
    compression = make_compression(args, args.seed)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    sampler = hvd.elastic.ElasticSampler(train_set, seed=args.seed)
    parts = {"model": model, "optimizer": optimizer, "compression": compression, "sampler": sampler}
    if not hasattr(compression, "state_dict"):  # one of Horovod's own
        del parts["compression"]
    state = hvd.elastic.TorchState(**parts, epoch=0, step=0)
    if args.checkpoint and args.checkpoint.exists():
        load(args.checkpoint, parts, state)
        say(f"goes on from step {state.step}")
    train(state, args, train_set, device)

    right = torch.tensor(0.0)
    model.eval()
    with torch.no_grad():
        for images, digits in DataLoader(test_set, 250):
            right += (model(images.to(device)).argmax(1).cpu() == digits).sum()
    accuracy, done = float(right) / len(test_set), state.epoch == args.epochs
    say(
        f"{'done' if done else 'stopped'} after step {state.step}, {hvd.size()} ranks: "
        f"accuracy {100 * accuracy:.2f}%"
    )
    result = {"done": done, "step": state.step, "ranks": hvd.size(), "accuracy": accuracy}
    if args.json and hvd.rank() == 0:
        args.json.write_text(json.dumps(result))
    return result


@hvd.elastic.run
def train(
    state: Any, args: argparse.Namespace, train_set: TensorDataset, device: torch.device
) -> None:
    """Elastic Horovod: begins anew, from the last commit, whenever workers have come or gone."""
    while state.epoch < args.epochs:
        loader = DataLoader(train_set, args.batch_size, sampler=state.sampler, drop_last=True)
        for place, (images, digits) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(images.to(device)), digits.to(device))
            loss.backward()
            state.optimizer.step()
            state.step += 1
            # Elastic Horovod: what this epoch has still to see, whatever the number of workers.
            state.sampler.record_batch(place, args.batch_size)
            if state.step % args.commit_interval == 0:
                say(f"step {state.step}\tranks {hvd.size()}\tloss {loss.item():.4f}")
                if wanted(args.stop_file):
                    save(args.checkpoint, state)
                    return
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        save(args.checkpoint, state)
        state.commit()


def wanted(stop_file: Path | None) -> bool:
    """Whether the first rank sees the stop file; all ranks ask together."""
    if stop_file is None:
        return False
    seen = torch.tensor([float(stop_file.exists())])
    return bool(hvd.broadcast(seen, root_rank=0, name="stop").item())


def save(path: Path | None, state: Any) -> None:
    """The first rank's state: with error feedback each rank would have residuals of its own."""
    if path is None or hvd.rank() != 0:
        return
    names = [
        name for name in ("model", "optimizer", "compression", "sampler") if hasattr(state, name)
    ]
    saved = {name: getattr(state, name).state_dict() for name in names}
    partial = path.with_suffix(".partial")
    torch.save(saved | {"epoch": state.epoch, "step": state.step}, partial)
    partial.replace(path)  # what is cut off in the middle leaves the old one


def load(path: Path, parts: dict[str, Any], state: Any) -> None:
    """Inverse of ``save``; then elastic Horovod makes all ranks equal to the first."""
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    state.epoch, state.step = saved["epoch"], saved["step"]
    state.save()


if __name__ == "__main__":
    main()
    sys.exit(0)
