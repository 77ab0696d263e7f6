"""A training whose workers come and go (run by tests/parallel/test_elastic.py).

python elastic.py FOLDER ENDING

FOLDER/hosts is what the discovery script prints; each worker writes FOLDER/<host>.log, a line of
JSON a step, with the error of the last model's averages: Horovod averages the same gradients in
float64. A host is added after step GROW. ENDING "killed": the worker on the second host kills
itself LATER steps later, in the middle of its backward pass; a step is not committed anywhere.
"left": the new host runs two workers, as the first one does, which is taken away after LATER steps.
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
from rank_optimizers import distributed

from hvd_adaptive import ALQ, ECDQ

GROW, LATER, LAST, COMMIT = 6, 9, 12, 2
SECOND, ADDED, WORKERS = "127.0.0.1", "127.1", 2


def main(folder: Path, ending: str) -> None:
    """Three models with an optimizer and a compressor each; the last one is not in the state."""
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
        ALQ(bits=8, norm="linf", bucket_size=512, update_steps=[0, 4, GROW + 3]),
    ]
    models = [make_model(0), make_model(1, width=64), make_model(2, width=64)]
    optimizers = [
        distributed(model, compressor, momentum=0.9, prefix=f"{i}.")
        for i, (model, compressor) in enumerate(zip(models, compressors, strict=True))
    ]
    handled = {
        f"{kind}{i}": one
        for kind, ones in (("net", models), ("step", optimizers), ("codec", compressors[:2]))
        for i, one in enumerate(ones)
    }
    state = hvd.elastic.TorchState(**handled, batch=0, grown=-1, shrunk=-1)
    batch = batches(hvd.rank(), zlib.crc32(host.encode()) % 100)

    @hvd.elastic.run
    def train(state):
        while not is_over(state):
            dies = ending == "killed" and host == SECOND and state.grown >= 0
            if dies and state.batch == state.grown + LATER:
                models[0][2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            losses, error = step()
            state.batch += 1
            note(state, losses, error)
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

    def step() -> tuple[list[float], float]:
        """One backward pass for all. The losses, and the error of the last model's average."""
        x, y = batch()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [torch.nn.functional.cross_entropy(model(x), y) for model in models]
        sum(losses).backward()
        own = gradients(models[2])
        for optimizer in optimizers[:2]:
            optimizer.step()
        optimizers[2].synchronize()
        exact = hvd.allreduce(own, name="exact")
        error = float((gradients(models[2]) - exact).norm() / exact.norm())
        with optimizers[2].skip_synchronize():
            optimizers[2].step()
        return [loss.item() for loss in losses], error

    def note(state, losses: list[float], error: float) -> None:
        flat = torch.cat([flat_parameters(model) for model in models])
        codecs = [compressor.parts.default for compressor in compressors]
        entry = {
            "batch": state.batch,
            "losses": losses,
            "error": error,
            "size": hvd.size(),
            "steps": [compressor.step for compressor in compressors],
            "versions": [codec.table_version for codec in codecs],
            "tables": [codec.table_fingerprint for codec in codecs],
            "bits": codecs[0].table.bits,
            "hash": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        }
        with (folder / f"{host}.log").open("a") as log:
            log.write(json.dumps(entry) + "\n")

    train(state)


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.double().view(-1) for p in model.parameters()])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
