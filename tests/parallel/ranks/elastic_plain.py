"""An elastic training in which only the line of the compression is this package's (run by
tests/parallel/test_elastic_plain.py).

python elastic_plain.py FOLDER ENDING

FOLDER/hosts is what the discovery script prints; each worker writes FOLDER/<host>.log, a line of
JSON a step, with the error of its averages: Horovod averages the same gradients in float64. A host
is added after step GROW. ENDING "left": it runs two workers, as the first host does, which is taken
away after LATER more steps; "killed": the worker on the second host kills itself LATER steps
after that, in the middle of its backward pass, and a step is not committed anywhere.
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

from hvd_adaptive import ALQ

GROW, LATER, LAST, COMMIT = 6, 5, 6, 2
SECOND, ADDED, WORKERS = "127.0.0.1", "127.1", 2


def main(folder: Path, ending: str) -> None:
    """One model; the compressor is no part of the state."""
    hvd.init()
    rest_while_waiting()
    torch.set_num_threads(1)
    host = os.environ["HOROVOD_HOSTNAME"]
    model = make_model()
    compressor = ALQ(bits=8, norm="linf", bucket_size=512, update_steps=[0, 4, GROW + 3])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, grown=-1, shrunk=-1)
    batch = batches(hvd.rank(), zlib.crc32(host.encode()) % 100)

    @hvd.elastic.run
    def train(state):
        while not is_over(state):
            dies = ending == "killed" and host == SECOND and state.grown >= 0
            if dies and state.batch == state.grown + LATER:
                model[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            error = step()
            state.batch += 1
            note(state, error)
            if state.batch == GROW and hvd.rank() == 0:
                with (folder / "hosts").open("a") as hosts:
                    hosts.write(f"{SECOND}:2\n" if ending == "left" else f"{ADDED}:1\n")
            if hvd.size() > WORKERS and state.grown < 0:
                state.grown = state.batch
            if hvd.size() == WORKERS and state.grown >= 0 and state.shrunk < 0:
                state.shrunk = state.batch
            leaves = ending == "left" and state.grown >= 0 and state.shrunk < 0
            if leaves and state.batch == state.grown + LATER and hvd.rank() == 0:
                (folder / "hosts").write_text(f"{SECOND}:2\n")
            if leaves or (state.batch >= GROW and state.grown < 0):
                time.sleep(0.1)  # until others are there, or have left
            if state.batch % COMMIT == 0:
                state.commit()

    def is_over(state) -> bool:
        if ending == "left":
            return 0 <= state.shrunk <= state.batch - LAST
        return 0 <= state.grown <= state.batch - LATER - LAST

    def step() -> float:
        """Of the average, relative to it."""
        x, y = batch()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        own = torch.cat([p.grad.double().view(-1) for p in model.parameters()])
        optimizer.synchronize()
        averages = torch.cat([p.grad.double().view(-1) for p in model.parameters()])
        exact = hvd.allreduce(own, name="exact")
        with optimizer.skip_synchronize():
            optimizer.step()
        return float((averages - exact).norm() / exact.norm())

    def note(state, error: float) -> None:
        digest = hashlib.sha256(flat_parameters(model).numpy().tobytes()).hexdigest()
        entry = {
            "batch": state.batch,
            "size": hvd.size(),
            "rank": hvd.rank(),
            "error": error,
            "step": compressor.step,
            "version": compressor.parts.default.table_version,
            "table": compressor.parts.default.table_fingerprint,
            "hash": digest,
        }
        with (folder / f"{host}.log").open("a") as log:
            log.write(json.dumps(entry) + "\n")

    train(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
