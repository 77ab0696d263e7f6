"""One worker of the soak: trains until told to stop, and tells what it has become.

python worker.py FOLDER SCHEME
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import psutil
import torch

from hvd_adaptive import ALQ, ECDQ, QSGD, SignSGD

SCHEMES = {
    "alq": lambda: ALQ(
        bucket_size=512,
        error_feedback="auto",
        exchange="scatter_reduce",
        update_steps=lambda step: step % 20 == 0,
    ),
    "qsgd": lambda: QSGD(bits=4, norm="linf", bucket_size=512, coding="huffman"),
    "signsgd": lambda: SignSGD(bucket_size=512, error_feedback=1.0),
    "ecdq": lambda: ECDQ(bits=2.0, bucket_size=512),
    "none": lambda: hvd.Compression.none,
}
COMMIT, CHECK = 10, 50
LEARNING_RATE = 0.05


def main(folder: Path, scheme: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    host = os.environ["HOROVOD_HOSTNAME"]
    faulthandler.register(signal.SIGUSR1)
    (folder / "workers" / host).write_text(str(os.getpid()))
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 400),
        torch.nn.ReLU(),
        torch.nn.Linear(400, 400),
        torch.nn.ReLU(),
        torch.nn.Linear(400, 10),
    )
    teacher = torch.randn(100, 10, generator=torch.Generator().manual_seed(99))
    compressor = SCHEMES[scheme]()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
    handled = {} if scheme == "none" else {"compression": compressor}
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, stop=False, **handled)
    log = (folder / "workers" / f"{host}.log").open("a")

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        tell(state, "begin")
        while not state.stop:
            # Of the batch and the rank alone: no state of its own that a restart would lose.
            generator = torch.Generator().manual_seed(1000 * state.batch + hvd.rank())
            x = torch.randn(32, 100, generator=generator)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
            loss.backward()
            optimizer.step()
            state.batch += 1
            if state.batch % COMMIT == 0:
                stop = torch.tensor([(folder / "stop").exists()], dtype=torch.uint8)
                state.stop = bool(hvd.broadcast(stop, 0, name="soak.stop"))
                if state.batch % CHECK == 0 or state.stop:
                    tell(state, "step", float(loss.detach()))
                state.commit()

    def tell(state: hvd.elastic.TorchState, event: str, loss: float | None = None) -> None:
        """Parameters are compared over all ranks: what is not equal ends the soak."""
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
        digests = hvd.allgather_object(digest, name="soak.digest")
        process = psutil.Process()
        entry = {
            "time": time.time(),
            "event": event,
            "host": host,
            "pid": process.pid,
            "rank": hvd.rank(),
            "size": hvd.size(),
            "batch": state.batch,
            "loss": loss,
            "equal": len(set(digests)) == 1,
            "rss": process.memory_info().rss,
            "threads": process.num_threads(),
            "files": process.num_fds(),
        }
        log.write(json.dumps(entry) + "\n")
        log.flush()

    train(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
