"""A small transformer with FSDP2, whose gradients travel in 4 bits.

torchrun --nproc-per-node 2 examples/fsdp2.py
torchrun --nproc-per-node 2 examples/fsdp2.py --bits 0     # FSDP's own reduce-scatter
"""

import argparse
import inspect

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from hvd_adaptive import EDEN
from hvd_adaptive.fsdp import compress_reduce_scatter

LENGTH, WIDTH = 64, 128


class Transformer(nn.Module):
    """Predict the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.scores = nn.Linear(WIDTH, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores of the characters after each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.embedding(text) + self.places
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.scores(x)


def main() -> None:
    """Train on the text of PyTorch's modules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, default=4, help="1 to 8; 0: no compression (4)")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    try:
        compressor = EDEN(bits=args.bits) if args.bits else None
    except ValueError as error:
        parser.error(str(error))
    dist.init_process_group("gloo")
    text = torch.tensor(list(inspect.getsource(nn.functional).encode()))

    torch.manual_seed(0)
    model = Transformer(256)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if compressor is not None:
        compressed = compress_reduce_scatter(model, compressor)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(args.steps):
        at = torch.randint(len(text) - LENGTH - 1, (8,), generator=draw)
        batch = torch.stack([text[i : i + LENGTH + 1] for i in at])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % 20 == 0 or step == args.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if dist.get_rank() == 0 and compressor is not None:
        report = compressed.report()
        print(f"{report['wire_bytes']:,} bytes sent by a process for a step's gradients")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
