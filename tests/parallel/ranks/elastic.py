"""Trainings whose workers come and go (run by tests/parallel/test_elastic.py).

python elastic.py FOLDER killed|left|local

FOLDER/hosts is what the discovery script prints; each worker writes FOLDER/<host>.log, a line of
JSON a turn, with the error of averages: Horovod averages the same in float64. A host is added after
turn ``grow``. ``later`` turns after it has come, the worker on the second host kills itself in the
middle of a turn; "left": the new host runs two workers, as the first one does, which is taken away
instead. "local" is LocalSGD, whose turns are rounds; others' turns are steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path

import horovod.torch as hvd
import torch
from training import batches, begin, distributed, flat_parameters, hash_of, loss_of, make_model

from hvd_adaptive import ALQ, ECDQ, LocalSGD

SECOND, ADDED, WORKERS = "127.0.0.1", "127.1", 2
EXACT = {"bits": 8, "norm": "linf", "bucket_size": 512}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Steps:
    """Three models with an optimizer and a compressor each; the last one is not in the state."""

    grow, later, last, commit = 6, 9, 12, 2

    def __init__(self, batch) -> None:
        self.batch = batch
        self.compressors = [
            ALQ(
                bucket_size=256,
                fusion_bytes=60_000,
                error_feedback="auto",
                exchange="scatter_reduce",
                update_steps=[0, 4],
                schedule={3: {"bits": 4}}.get,
            ),
            ECDQ(bits=2.0, bucket_size=256),
            ALQ(update_steps=[0, 4, self.grow + 3], **EXACT),
        ]
        self.models = [make_model(0), make_model(1, width=64), make_model(2, width=64)]
        self.optimizers = [
            distributed(model, compressor, momentum=0.9, prefix=f"{i}.")
            for i, (model, compressor) in enumerate(zip(self.models, self.compressors, strict=True))
        ]
        kinds = {"net": self.models, "step": self.optimizers, "codec": self.compressors[:2]}
        self.handled = {f"{kind}{i}": one for kind in kinds for i, one in enumerate(kinds[kind])}

    def turn(self, dies: bool) -> dict:
        """A step of each, after one backward pass for all, within which it may die."""
        if dies:
            self.models[0][2].weight.register_hook(lambda _: die())
        batch = self.batch()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses = [loss_of(model, batch) for model in self.models]
        sum(losses).backward()
        own = self.gradients()
        for optimizer in self.optimizers[:2]:
            optimizer.step()
        self.optimizers[2].synchronize()
        exact = hvd.allreduce(own, name="exact")
        error = float((self.gradients() - exact).norm() / exact.norm())
        with self.optimizers[2].skip_synchronize():
            self.optimizers[2].step()
        codecs = [compressor.parts.default for compressor in self.compressors]
        return {
            "losses": [loss.item() for loss in losses],
            "error": error,
            "steps": [compressor.step for compressor in self.compressors],
            "versions": [codec.table_version for codec in codecs],
            "tables": [codec.table_fingerprint for codec in codecs],
            "bits": codecs[0].table.bits,
        }

    def gradients(self) -> torch.Tensor:
        return torch.cat([p.grad.double().view(-1) for p in self.models[2].parameters()])


class Rounds:
    """Momentum 0 and rate 1: a round ends with the mean of the ranks' parameters."""

    grow, later, last, commit = 4, 3, 3, 1
    steps = 3

    def __init__(self, batch) -> None:
        self.batch, self.model = batch, make_model()
        self.models, self.compressor = [self.model], ALQ(update_steps=[0, 2], **EXACT)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = LocalSGD(inner, every=self.steps + 1, compression=self.compressor)
        self.handled = {"model": self.model, "optimizer": self.optimizer}

    def turn(self, dies: bool) -> dict:
        before = flat_parameters(self.model).double()
        for _ in range(self.steps):
            self.optimizer.zero_grad()
            loss_of(self.model, self.batch()).backward()
            self.optimizer.step()
        if dies:
            die()
        own = flat_parameters(self.model).double()
        exact = hvd.allreduce(own, name="exact")
        moved = hvd.allreduce((own - before).norm(), name="moved")
        self.optimizer.average()
        error = float((flat_parameters(self.model) - exact).norm() / moved)
        version = self.compressor.parts.default.table_version
        return {"error": error, "rounds": self.optimizer.rounds, "version": version}


def main(folder: Path, ending: str) -> None:
    begin()
    host = os.environ["HOROVOD_HOSTNAME"]
    batch = batches(hvd.rank(), zlib.crc32(host.encode()) % 100)
    of = Rounds(batch) if ending == "local" else Steps(batch)
    state = hvd.elastic.TorchState(**of.handled, batch=0, grown=-1, shrunk=-1)

    @hvd.elastic.run
    def train(state):
        while not is_over(state):
            due = state.grown >= 0 and state.batch >= state.grown + of.later
            entry = of.turn(dies=due and ending != "left" and host == SECOND)
            state.batch += 1
            entry |= {"batch": state.batch, "size": hvd.size(), "hash": hash_of(*of.models)}
            with (folder / f"{host}.log").open("a") as log:
                log.write(json.dumps(entry) + "\n")
            if state.batch == of.grow and hvd.rank() == 0:
                with (folder / "hosts").open("a") as hosts:
                    hosts.write(f"{SECOND}:2\n" if ending == "left" else f"{ADDED}:1\n")
            if hvd.size() > WORKERS and state.grown < 0:
                state.grown = state.batch
            if hvd.size() == WORKERS and state.grown >= 0 and state.shrunk < 0:
                state.shrunk = state.batch
            leaves = ending == "left" and state.grown >= 0 and state.shrunk < 0
            if leaves and state.batch == state.grown + of.later and hvd.rank() == 0:
                (folder / "hosts").write_text(f"{SECOND}:2\n")
            if leaves or (state.batch >= of.grow and state.grown < 0):
                time.sleep(0.1)  # until others are there, or have left
            if state.batch % of.commit == 0:
                state.commit()

    def is_over(state) -> bool:
        if ending == "left":
            return 0 <= state.shrunk <= state.batch - of.last
        return 0 <= state.grown <= state.batch - of.later - of.last

    train(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
