"""Ranks that share a GPU train a small network, by every exchange; run by benchmarks/gpu.py.

    horovodrun -np 2 --gloo python benchmarks/gpu_ranks.py [--device cuda]

Prints a line of JSON: for each way to train the last loss over the first one's. Parameters must be
the same bits on all ranks after every step.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from typing import Any

import horovod.torch as hvd
import torch

from hvd_adaptive import ALQ, QSGD, OneBitSGD

STEPS = 12
WAYS: dict[str, Any] = {
    "ALQ, allgather": lambda: ALQ(bits=3),
    "ALQ, scatter_reduce": lambda: ALQ(bits=3, exchange="scatter_reduce"),
    "QSGD, auto": lambda: QSGD(bits=4, norm="linf", exchange="auto"),
    "OneBitSGD with error feedback": lambda: OneBitSGD(bucket_size=512),
}


def train(compressor: Any, device: torch.device) -> float:
    """The last loss over the first one's; AssertionError where ranks differ."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 10)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    x = torch.randn(64, 256, generator=generator).to(device)
    y = torch.randint(10, (64,), generator=generator).to(device)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()
        own = torch.tensor([zlib.crc32(flat.numpy().tobytes())])
        everyone = hvd.allgather(own, name=f"checksum.{step}")
        assert bool((everyone == own).all()), f"ranks differ after step {step}"
    return losses[-1] / losses[0]


def main() -> None:
    """Train by every way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    device = parser.parse_args().device
    hvd.init()
    told = {}
    for name, make in WAYS.items():
        begin = time.perf_counter()
        told[name] = {"loss": train(make(), device), "s": time.perf_counter() - begin}
    if hvd.rank() == 0:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
