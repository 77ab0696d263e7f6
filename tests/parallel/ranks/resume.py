"""Train, save each rank's state half way, go on; or go on from there (run by test_resume.py).

python resume.py FOLDER whole|rest
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from conftest import assert_same_everywhere, flat_parameters, make_model, rest_while_waiting, train
from rank_optimizers import distributed

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
    """Prints a hash of the parameters and residuals for each case."""
    hvd.init()
    rest_while_waiting()
    torch.set_num_threads(1)
    for case, construct in CASES.items():
        path = folder / f"{case}-{hvd.rank()}.pt"
        model, compressor = make_model(), construct()
        if case == "retry":
            model[0].bias.data[:150] = -1e3
        optimizer = distributed(model, compressor, momentum=0.9)
        if part == "whole":
            if case == "set":
                compressor.set(exchange="scatter_reduce", warmup_steps=2)
            train(model, optimizer, HALF, seed=1)
            parts = {"model": model, "optimizer": optimizer, "compressor": compressor}
            torch.save({name: one.state_dict() for name, one in parts.items()}, path)
        else:
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            compressor.load_state_dict(state["compressor"])
        train(model, optimizer, REST, seed=2)
        flat = flat_parameters(model)
        assert_same_everywhere(flat, case)
        residuals = compressor.state_dict().get("residuals", {"parameters": {}})["parameters"]
        whole = torch.cat([flat, *(residuals[name] for name in sorted(residuals))])
        digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
        print(f"{case} rank={hvd.rank()} step={compressor.step} hash={digest}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
