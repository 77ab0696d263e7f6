"""Checkpoints: train, be stopped at any step, go on, and end with the bits of a run that was not.

mpirun -np 2 python examples/resume.py --checkpoint run          # SIGUSR1 or SIGTERM: saves, ends
mpirun -np 2 python examples/resume.py --checkpoint run          # goes on
mpirun -np 2 python examples/resume.py --checkpoint run --stop-after 30

Each rank has a file of its own, run-0.pt and so on: residuals of error feedback differ. The hash
that is printed at the end tells runs apart.
"""

from __future__ import annotations

import hashlib
import signal
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from compression import make_compression
from flags import make_parser, parse, say, start
from lenet import LeNet, read_images, split


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Train to the last step or a stop; returns the step, whether it is the last, and a hash."""
    parser = make_parser(__doc__, error_feedback="auto")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="as a signal would")
    parser.add_argument("--save-interval", type=int, default=50, metavar="STEPS")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("resume"),
        metavar="PREFIX",
        help="of the files' names (resume)",
    )
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank (32)")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=42)
    args = parse(parser, words)
    device = start(args)
    caught: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: caught.append(number))

    torch.manual_seed(args.seed)
    train_set, _ = split(*read_images())
    model = LeNet().to(device)
    compression = make_compression(args, args.seed)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), args.lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    parts = {"model": model, "optimizer": optimizer, "compression": compression}
    path = args.checkpoint.with_name(f"{args.checkpoint.name}-{hvd.rank()}.pt")
    step = load(path, parts)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    while step < args.steps:
        # The step names the examples, so there is no sampler to save.
        draw = torch.Generator().manual_seed((args.seed * hvd.size() + hvd.rank()) << 24 | step)
        chosen = torch.randint(len(train_set), (args.batch_size,), generator=draw)
        images, digits = (tensor[chosen].to(device) for tensor in train_set.tensors)
        optimizer.zero_grad()
        F.cross_entropy(model(images), digits).backward()
        optimizer.step()
        step += 1
        # A signal may reach ranks in different steps, or only one of them: they decide together.
        stop = torch.tensor([float(bool(caught) or step == args.stop_after)])
        stop = hvd.allreduce(stop, op=hvd.Max, name="stop").item() > 0
        if stop or step % args.save_interval == 0 or step == args.steps:
            save(path, parts, step)
        if stop:
            break
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    say(f"{'done' if step == args.steps else 'stopped'} after step {step}: weights {digest}")
    return {"step": step, "done": step == args.steps, "weights": digest}


def save(path: Path, parts: dict[str, Any], step: int) -> None:
    """This rank's file; what is cut off in the middle leaves the old one."""
    state = {name: part.state_dict() for name, part in parts.items() if has_state(part)}
    partial = path.with_suffix(".partial")
    torch.save(state | {"step": step}, partial)
    partial.replace(path)


def load(path: Path, parts: dict[str, Any]) -> int:
    """The step to go on from: the last that all ranks saved, 0 where one has no file."""
    saved = torch.load(path, weights_only=True) if path.exists() else {"step": 0}
    own = torch.tensor([saved["step"]])
    steps = hvd.allgather(own, name="saved").tolist()
    if len(set(steps)) > 1:
        sys.exit(f"ranks saved different steps, {steps}: remove their files, {path} and the others")
    if steps[0]:
        for name, part in parts.items():
            if has_state(part):
                part.load_state_dict(saved[name])
        say(f"goes on from step {steps[0]}")
    return steps[0]


def has_state(part: Any) -> bool:
    """Horovod's own compressors have none."""
    return hasattr(part, "state_dict")


if __name__ == "__main__":
    main()
    sys.exit(0)
