"""An elastic training with LocalSGD (run by tests/parallel/test_elastic.py).

python elastic_local.py FOLDER

FOLDER/hosts is what the discovery script prints; each worker writes FOLDER/<host>.log, a line of
JSON a round, with the error of its average: Horovod averages the same parameters in float64. A host
is added after round GROW. LATER rounds after that the worker on the second host kills itself in the
middle of a round.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path

import horovod.torch as hvd
import torch
from conftest import batches, flat_parameters, make_model, rest_while_waiting

from hvd_adaptive import ALQ, LocalSGD

GROW, LATER, LAST, STEPS = 4, 3, 3, 3
SECOND, ADDED, WORKERS = "127.0.0.1", "127.1", 2


def main(folder: Path) -> None:
    """Momentum 0 and rate 1: a round ends with the mean of the ranks' parameters."""
    hvd.init()
    rest_while_waiting()
    torch.set_num_threads(1)
    host = os.environ["HOROVOD_HOSTNAME"]
    model = make_model()
    compressor = ALQ(bits=8, norm="linf", bucket_size=512, update_steps=[0, 2])
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = LocalSGD(inner, every=STEPS + 1, compression=compressor)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, round=0, grown=-1)
    batch = batches(hvd.rank(), zlib.crc32(host.encode()) % 100)

    def take_step() -> None:
        x, y = batch()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    @hvd.elastic.run
    def train(state):
        while not 0 <= state.grown <= state.round - LATER - LAST:
            before = flat_parameters(model).double()
            for _ in range(STEPS):
                take_step()
            if host == SECOND and 0 <= state.grown <= state.round - LATER:
                os.kill(os.getpid(), signal.SIGKILL)
            own = flat_parameters(model).double()
            exact = hvd.allreduce(own, name="exact")
            moved = hvd.allreduce((own - before).norm(), name="moved")
            optimizer.average()
            error = float((flat_parameters(model) - exact).norm() / moved)
            state.round += 1
            digest = hashlib.sha256(flat_parameters(model).numpy().tobytes()).hexdigest()
            entry = {"round": state.round, "size": hvd.size(), "error": error, "hash": digest}
            entry |= {"rounds": optimizer.rounds, "version": compressor.parts.default.table_version}
            with (folder / f"{host}.log").open("a") as log:
                log.write(json.dumps(entry) + "\n")
            if state.round == GROW and hvd.rank() == 0:
                with (folder / "hosts").open("a") as hosts:
                    hosts.write(f"{ADDED}:1\n")
            if hvd.size() > WORKERS and state.grown < 0:
                state.grown = state.round
            if state.round >= GROW and state.grown < 0:
                time.sleep(0.1)  # until the other is there
            state.commit()

    train(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
