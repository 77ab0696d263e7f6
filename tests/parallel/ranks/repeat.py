"""Train a few steps and print a hash of the parameters (run by tests/parallel/test_repeat.py)."""

from __future__ import annotations

import hashlib

import horovod.torch as hvd
import torch
from conftest import assert_same_everywhere, flat_parameters, make_model, train

from hvd_adaptive import ALQ


def main() -> None:
    """Several groups, three updates of the table, tensors large and small."""
    hvd.init()
    torch.set_num_threads(1)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=ALQ(bucket_size=512, fusion_bytes=60_000, update_steps=[0, 3, 7]),
    )
    train(model, optimizer, 12)
    flat = flat_parameters(model)
    assert_same_everywhere(flat, "parameters")
    if hvd.rank() == 0:
        print(f"hash={hashlib.sha256(flat.numpy().tobytes()).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
