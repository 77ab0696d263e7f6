"""A character LSTM on Python's own help texts: much to send for little to compute.

mpirun -np 2 python examples/char_lstm.py                        # ALQ, 3 bits
mpirun -np 2 python examples/char_lstm.py --compression none     # Horovod's float32

The text is in every Python: pydoc_data.topics, some 400,000 characters. As in the QSGD paper's
LSTM nearly all parameters lie in a few large matrices.
"""

from __future__ import annotations

import math
import sys
import time
from pydoc_data import topics

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from compression import Traffic, make_compression
from flags import make_parser, parse, say, start
from torch import nn


class CharLSTM(nn.Module):
    """Predicts the next character."""

    def __init__(self, characters: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.lstm = nn.LSTM(64, width, layers, batch_first=True)
        self.scores = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores (batch, length, characters), from (batch, length)."""
        return self.scores(self.lstm(self.embedding(text))[0])


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train; returns bits per character before and after, and bytes sent in a step."""
    parser = make_parser(__doc__)
    parser.add_argument("--width", type=int, default=256, help="of the LSTM (256)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="characters of an example (64)")
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank (16)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=42)
    args = parse(parser, words)
    device = start(args)
    train_text, test_text, characters = read_text()

    torch.manual_seed(args.seed)
    model = CharLSTM(characters, args.width, args.layers).to(device)
    # Horovod: broadcast parameters; the compression is one argument of the optimizer.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    compression = make_compression(args, args.seed)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), args.lr),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    traffic = Traffic(compression, model)
    say(f"{len(train_text):,} characters, {traffic.coordinates:,} parameters")
    draw = torch.Generator().manual_seed(args.seed + hvd.rank())
    before, begin = test(model, test_text, args.length, device), time.perf_counter()
    for step in range(args.steps):
        first = torch.randint(
            len(train_text) - args.length - 1, (args.batch_size, 1), generator=draw
        )
        text = train_text[first + torch.arange(args.length + 1)].to(device)
        optimizer.zero_grad()
        loss = bits(model(text[:, :-1]), text[:, 1:])
        loss.backward()
        # What Horovod has not averaged yet cannot be clipped.
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        traffic.count(step)
        if step % 20 == 0:
            say(f"step {step}\t{loss.item():.3f} bits per character")
    seconds = (time.perf_counter() - begin) / max(1, args.steps)
    after, sent = test(model, test_text, args.length, device), traffic.result()["wire_bytes"]
    say(
        f"test: {before:.3f} bits per character before, {after:.3f} after {args.steps} steps\n"
        f"{sent:,.0f} bytes sent by a rank in a step of {1e3 * seconds:.0f} ms"
    )
    return {"before": before, "after": after, "wire_bytes": sent}


def read_text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """The help texts as numbers, int64: nine tenths, one tenth, and how many characters there
    are."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([known[character] for character in text])
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:], len(known)


def bits(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Mean bits per character."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten()) / math.log(2)


@torch.no_grad()
def test(model: nn.Module, text: torch.Tensor, length: int, device: torch.device) -> float:
    """Bits per character of a part of the test text."""
    rows = text[: 64 * length + 1]
    inputs, following = rows[:-1].view(64, length), rows[1:].view(64, length)
    return bits(model(inputs.to(device)), following.to(device)).item()


if __name__ == "__main__":
    main()
    sys.exit(0)
