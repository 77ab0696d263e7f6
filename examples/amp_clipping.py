"""Mixed precision, gradient clipping and error feedback together.

mpirun -np 2 python examples/amp_clipping.py
mpirun -np 2 python examples/amp_clipping.py --no-error-feedback --compression qsgd --bits 4

The order matters: gradients travel scaled, then are unscaled, then clipped, then applied. A rank's
overflow makes all ranks skip the step.
"""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from compression import make_compression
from flags import make_parser, parse, say, start
from lenet import LeNet, read_images, split


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train; returns the accuracy, the steps that were skipped and the last loss scale."""
    parser = make_parser(__doc__, error_feedback="auto")
    parser.add_argument(
        "--no-error-feedback",
        dest="error_feedback",
        action="store_const",
        const=None,
        help="forget what quantising loses",
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank (32)")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to (1)")
    parser.add_argument(
        "--overflow-step",
        type=int,
        default=3,
        metavar="STEP",
        help="at which the last rank's loss is infinite (3)",
    )
    parser.add_argument("--seed", type=int, default=42)
    args = parse(parser, words)
    device = start(args)
    torch.manual_seed(args.seed)
    train_set, test_set = split(*read_images())
    model = LeNet().to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler(device.type)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), args.lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        # Residuals of error feedback must know the scale that gradients have.
        compression=make_compression(args, args.seed, grad_scaler=scaler),
    )
    # CPUs compute in bfloat16, whose range is float32's; the scaler works on both.
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    draw, skipped = torch.Generator().manual_seed(args.seed + hvd.rank()), 0
    for step in range(args.steps):
        chosen = torch.randint(len(train_set), (args.batch_size,), generator=draw)
        images, digits = (tensor[chosen].to(device) for tensor in train_set.tensors)
        optimizer.zero_grad()
        with torch.autocast(device.type, half):
            scores = model(images)
        loss = F.cross_entropy(scores.float(), digits)
        if step == args.overflow_step and hvd.rank() == hvd.size() - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        # Horovod: 1. average the scaled gradients; residuals know the scale.
        optimizer.synchronize()
        # 2. Unscale: finds an Inf or NaN, which all ranks have now if one had it.
        scaler.unscale_(optimizer)
        # 3. Clip the average. A NaN has no norm: such a step is skipped below.
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        # 4. Apply; Horovod must not average once more.
        scale = scaler.get_scale()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        if step % 20 == 0:
            say(f"step {step}\tloss {loss.item():.4f}\tscale {scale:.3g}")
    with torch.no_grad():
        images, digits = (tensor.to(device) for tensor in test_set.tensors)
        accuracy = float((model(images).argmax(1) == digits).float().mean())
    say(f"accuracy {100 * accuracy:.2f}%, {skipped} steps skipped, scale {scaler.get_scale():.3g}")
    return {"accuracy": accuracy, "skipped": skipped, "scale": scaler.get_scale()}


if __name__ == "__main__":
    main()
    sys.exit(0)
