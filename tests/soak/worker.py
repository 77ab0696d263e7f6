"""One worker of the soak: trains until told to stop, and tells what it has become.

python worker.py FOLDER SCHEME
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "parallel/ranks"))

import horovod.torch as hvd
import psutil
import torch
from training import batches, distributed, hash_of, loss_of, make_model, take_step

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


def main(folder: Path, scheme: str) -> None:
    hvd.init()
    host = os.environ["HOROVOD_HOSTNAME"]
    faulthandler.register(signal.SIGUSR1)
    (folder / "workers" / host).write_text(str(os.getpid()))
    model, compressor = make_model(width=1000), SCHEMES[scheme]()
    optimizer = distributed(model, compressor, lr=0.05)
    handled = {} if scheme == "none" else {"compression": compressor}
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, stop=False, **handled)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        tell(state, "begin")
        while not state.stop:
            # Of the batch and the rank alone: no state of its own that a restart would lose.
            loss = loss_of(model, batches(hvd.rank(), state.batch)())
            take_step(optimizer, loss)
            state.batch += 1
            if state.batch % COMMIT == 0:
                stop = torch.tensor([(folder / "stop").exists()], dtype=torch.uint8)
                state.stop = bool(hvd.broadcast(stop, 0, name="soak.stop"))
                if state.batch % CHECK == 0 or state.stop:
                    tell(state, "step", float(loss.detach()))
                state.commit()

    def tell(state: hvd.elastic.TorchState, event: str, loss: float | None = None) -> None:
        """Parameters are compared over all ranks: what is not equal ends the soak."""
        digests = hvd.allgather_object(hash_of(model), name="soak.digest")
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
        with (folder / "workers" / f"{host}.log").open("a") as log:
            log.write(json.dumps(entry) + "\n")

    train(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
