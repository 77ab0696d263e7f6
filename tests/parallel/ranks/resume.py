"""Train, save each rank's state half way, go on; or go on from there (run by test_resume.py).

python resume.py FOLDER whole|rest
"""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from training import (
    assert_same_everywhere,
    begin,
    distributed,
    hash_of,
    make_model,
    residuals_of,
    train,
)

from hvd_adaptive import ALQ, ECDQ, ORQ, QCS, QSGD, BinGrad, NaturalCompression, SparseSGD

HALF, REST = 4, 3
SMALL = {"bucket_size": 256, "fusion_bytes": 60_000}
REDUCE = SMALL | {"exchange": "scatter_reduce"}
# Updates lie before and after the half; in "retry" half of the first layer is dead, whose buckets
# are zero, so that they are tried again.
CASES = {
    "alq": lambda: ALQ(error_feedback="auto", update_steps=(s for s in (0, 3, 6)), **SMALL),
    "retry": lambda: ALQ(update_steps=[2, 50], **REDUCE),
    "orq": lambda: ORQ(levels=5, error_feedback=1.0, **REDUCE),
    "ecdq": lambda: ECDQ(bits=2.0, parameter_bits={"0.weight": 3}, **SMALL),
    "qcs": lambda: QCS(bucket_size=1024, gain=16),
    "natural": lambda: NaturalCompression(),
    "sparse": lambda: SparseSGD(density=0.3, error_feedback=0.5, bucket_size=256),
    "bingrad": lambda: BinGrad(warmup_steps=5, error_feedback=1.0, bucket_size=256),
    "parts": lambda: ALQ(scope="tensor", parameter_bits={"0.*": 4}, tail="full", **SMALL),
    "set": lambda: QSGD(coding="huffman", schedule={2: {"bits": 4}, 5: {"bits": 2}}.get, **SMALL),
}


def main(folder: Path, part: str) -> None:
    """Print a hash of the parameters and residuals for each case."""
    begin()
    for case, construct in CASES.items():
        path = folder / f"{case}-{hvd.rank()}.pt"
        model, compressor = make_model(dead=150 * (case == "retry")), construct()
        optimizer = distributed(model, compressor, momentum=0.9)
        parts = {"model": model, "optimizer": optimizer, "compressor": compressor}
        if part == "whole":
            if case == "set":
                compressor.set(exchange="scatter_reduce", warmup_steps=2)
            train(model, optimizer, HALF, seed=1)
            torch.save({name: one.state_dict() for name, one in parts.items()}, path)
        else:
            state = torch.load(path, weights_only=True)
            for name, one in parts.items():
                one.load_state_dict(state[name])
        train(model, optimizer, REST, seed=2)
        assert_same_everywhere(model)
        residuals = residuals_of(compressor)
        digest = hash_of(model, *(residuals[name] for name in sorted(residuals)))
        print(f"{case} rank={hvd.rank()} step={compressor.step} hash={digest}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
