"""Imported by the process that ranks are forked from (forked.py): what they need, with the kernels
that most of them run. No thread may start here, and nothing of Horovod or MPI."""

from __future__ import annotations

import horovod.torch  # noqa: F401
import pytest  # noqa: F401
import torch
from tqdm import tqdm

from hvd_adaptive import ALQ, ECDQ, QSGD, BinGrad, simulate

SCHEMES = (
    ALQ(bucket_size=256, update_steps=[0], exchange="scatter_reduce"),
    ALQ(bucket_size=256, update_steps=[0]),
    BinGrad(bucket_size=256, error_feedback=1.0, exchange="scatter_reduce"),
    ECDQ(bits=2, bucket_size=256),
    QSGD(bucket_size=256, exchange="scatter_reduce"),
)

torch.set_num_threads(1)
tqdm.monitor_interval = 0  # no thread of its own
for scheme in SCHEMES:
    simulate.train(
        torch.nn.Linear(60, 50),
        lambda rank, step: (torch.ones(8, 60), torch.arange(8)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        compressor=scheme,
        workers=2,
        steps=1,
        progress=False,
    )
