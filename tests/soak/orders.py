"""Two optimizers that each rank steps in an order of its own, in a process set, again and again.

    mpirun -np 3 --oversubscribe python tests/soak/orders.py [--runs 20] [--steps 8] [--seed 0]

Ranks 0 and 2 train; hooks sleep up to 20 ms, and each rank has a worker or not. Each run makes new
compressors and optimizers. A run that takes a minute is a hang: the rank prints the stacks of its
threads, and the job ends with status 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import time

import horovod.torch as hvd
import torch

from hvd_adaptive import ALQ, QSGD, Tuning

SECONDS = 60
SIZES = {"w": 5000, "b": 40, "v": 900}
SCHEMES = (
    lambda **k: ALQ(bits=4, update_steps=[0, 2, 5], **k),
    lambda **k: QSGD(bits=4, exchange="scatter_reduce", **k),
    lambda **k: QSGD(bits=4, error_feedback=0.5, **k),
)


def one_run(number: int, steps: int, seed: int, members: hvd.ProcessSet) -> None:
    """Train two models, and check that the ranks of ``members`` end with the same bits."""
    shared = random.Random(f"{seed} {number}")
    own = random.Random(f"{seed} {number} {hvd.rank()}")
    schemes = [shared.choice(SCHEMES) for _ in range(2)]
    pairs = []
    for net, scheme in enumerate(schemes):
        compressor = scheme(
            bucket_size=256,
            fusion_bytes=8192,
            seed=number,
            tuning=Tuning(worker=own.random() < 0.5),
        )
        weights = {n: torch.nn.Parameter(torch.zeros(size)) for n, size in SIZES.items()}
        for weight in weights.values():
            weight.register_hook(lambda grad: time.sleep(own.random() * 0.02))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weights.values(), lr=0.1),
            named_parameters=[(f"{net}.{n}", w) for n, w in weights.items()],
            compression=compressor,
            process_set=members,
        )
        pairs.append((weights, optimizer))
    for _ in range(steps):
        loss = 0.0
        for weights, optimizer in pairs:
            optimizer.zero_grad()
            for weight in weights.values():
                loss = loss + (weight * torch.randn(weight.shape)).sum()
        loss.backward()
        for _, optimizer in own.sample(pairs, 2):
            optimizer.step()
    flat = torch.cat([w.detach() for weights, _ in pairs for w in weights.values()])
    everyone = hvd.allgather(flat[None], name="soak.same", process_set=members)
    assert all(torch.equal(theirs, flat) for theirs in everyone), f"run {number}: ranks differ"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="default: 20")
    parser.add_argument("--steps", type=int, default=8, help="of each run; default: 8")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args()
    members = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[members])
    begin = time.monotonic()
    for number in range(options.runs):
        if members.included():
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            one_run(number, options.steps, options.seed, members)
            faulthandler.cancel_dump_traceback_later()
            if hvd.rank() == 0:
                print(f"run {number}: fine after {time.monotonic() - begin:.0f} s", flush=True)
    hvd.barrier()


if __name__ == "__main__":
    main()
