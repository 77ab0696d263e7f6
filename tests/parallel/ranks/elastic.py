"""A training whose workers come and go (run by tests/parallel/test_elastic.py).

python elastic.py FOLDER

FOLDER/hosts is what the discovery script prints; each worker writes FOLDER/<host>.log, a line of
JSON a step. A host is added after step GROW; the worker on the second host kills itself LATER steps
after that, in the middle of its backward pass.
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

from hvd_adaptive import ALQ, ECDQ

GROW, LATER, LAST, COMMIT = 6, 9, 12, 2
SECOND, ADDED = "127.0.0.1", "127.1"


def main(folder: Path) -> None:
    """Two models, each with its own optimizer and compressor."""
    hvd.init()
    rest_while_waiting()
    torch.set_num_threads(1)
    host = os.environ["HOROVOD_HOSTNAME"]
    compressors = [
        ALQ(
            bucket_size=256,
            fusion_bytes=60_000,
            error_feedback="auto",
            exchange="scatter_reduce",
            update_steps=[0, 4],
            schedule={3: {"bits": 4}}.get,
        ),
        ECDQ(bits=2.0, bucket_size=256),
    ]
    models = [make_model(0), make_model(1, width=64)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=[(f"{i}.{name}", p) for name, p in model.named_parameters()],
            compression=compressor,
        )
        for i, (model, compressor) in enumerate(zip(models, compressors, strict=True))
    ]
    handled = {
        f"{kind}{i}": one
        for kind, ones in (("net", models), ("step", optimizers), ("codec", compressors))
        for i, one in enumerate(ones)
    }
    state = hvd.elastic.TorchState(**handled, batch=0, grown=-1)
    batch = batches(hvd.rank(), zlib.crc32(host.encode()) % 100)

    @hvd.elastic.run
    def train(state):
        while state.grown < 0 or state.batch < state.grown + LATER + LAST:
            x, y = batch()
            if host == SECOND and state.grown >= 0 and state.batch == state.grown + LATER:
                models[0][2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            state.batch += 1
            note(state, losses)
            if state.batch == GROW and hvd.rank() == 0:
                with (folder / "hosts").open("a") as hosts:
                    hosts.write(f"{ADDED}:1\n")
            if hvd.size() == 3 and state.grown < 0:
                state.grown = state.batch
            if state.batch >= GROW and state.grown < 0:
                time.sleep(0.1)  # until the newcomer is there
            if state.batch % COMMIT == 0:
                state.commit()

    def note(state, losses: list[float]) -> None:
        flat = torch.cat([flat_parameters(model) for model in models])
        entry = {
            "time": time.time(),
            "batch": state.batch,
            "losses": losses,
            "rank": hvd.rank(),
            "size": hvd.size(),
            "steps": [compressor.step for compressor in compressors],
            "versions": [compressor.parts.default.table_version for compressor in compressors],
            "tables": [compressor.parts.default.table_fingerprint for compressor in compressors],
            "bits": compressors[0].parts.default.table.bits,
            "hash": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        }
        with (folder / f"{host}.log").open("a") as log:
            log.write(json.dumps(entry) + "\n")

    train(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
