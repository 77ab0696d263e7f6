"""Every rank: run examples shortened, one after the other in one process, and check what they give.

test_examples_all.py runs: python example_runs.py FOLDER PORT... (of a store for each that torchrun
starts)
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import amp_clipping
import char_lstm
import custom_scheme
import ddp_hook
import elastic
import fsdp2
import horovod.torch as hvd
import local_sgd
import ppo
import resume
import synthetic_benchmark
import torch
from lenet import split
from torch.utils.data import TensorDataset

from hvd_adaptive import instances

ROOT = Path(__file__).resolve().parents[2]
# What an untrained net gets right is about a tenth.
TRAINED = 0.6
QUICK = ["--no-cuda"]
EXAMPLES = (amp_clipping, char_lstm, custom_scheme, elastic, resume, synthetic_benchmark)


def run_synthetic_benchmark() -> None:
    """Compressed, a rank sends 2.83 bits of 32; the net has torchvision's 11,689,512 parameters."""
    small = "--image-size 32 --batch-size 2 --num-iters 1 --num-batches-per-iter 1"
    flags = [*QUICK, *small.split(), "--num-warmup-batches", "0", "--bits", "3"]
    compressed = synthetic_benchmark.main(flags)
    assert compressed["parameters"] == 11_689_512
    assert compressed["images_per_second"] > 0
    assert 10 < 4 * 11_689_512 / compressed["wire_bytes"] < 32 / 2.8


def check_resnets() -> None:
    """Names and shapes are those that the laboratory's tables list, torchvision's."""
    for model in ("resnet18", "resnet50"):
        table = ROOT / "benchmarks" / "laboratory" / "shapes" / f"{model}.txt"
        rows = [line.split() for line in table.read_text().splitlines() if line.strip()]
        listed = {name: tuple(map(int, shape)) for name, *shape in rows}
        made = synthetic_benchmark.MODELS[model]().named_parameters()
        assert {name: tuple(p.shape) for name, p in made} == listed


def run_char_lstm() -> None:
    """A few steps lower the bits per character of text that was not seen."""
    small = "--width 48 --layers 1 --steps 30 --length 32 --lr 0.01"
    told = char_lstm.main([*QUICK, *small.split()])
    assert 6 < told["before"] < 8  # about log2 of the number of characters
    assert told["after"] < told["before"] - 1


def run_amp_clipping() -> None:
    """One rank's overflow makes all skip that step, and that one alone; the net learns."""
    told = amp_clipping.main([*QUICK, "--steps", "28", "--overflow-step", "5"])
    assert (told["skipped"], told["scale"]) == (1, 2.0**15)
    assert told["accuracy"] > TRAINED


def run_resume(folder: Path) -> None:
    """Stopped and resumed, a run ends with the weights of one that was not."""
    short = [*QUICK, "--steps", "9"]
    instances.start_over()  # as processes of their own do
    whole = resume.main([*short, "--checkpoint", str(folder / "whole")])
    instances.start_over()
    first = resume.main([*short, "--checkpoint", str(folder / "two"), "--stop-after", "5"])
    second = resume.main([*short, "--checkpoint", str(folder / "two")])
    assert (first["step"], first["done"]) == (5, False)
    assert (second["step"], second["done"]) == (9, True)
    assert second["weights"] == whole["weights"] != first["weights"]


def run_custom_scheme() -> None:
    """It learns; means are right, a NaN spoils its bucket alone, and zeros stay zeros."""
    told = custom_scheme.main([*QUICK, "--steps", "28", "--error-feedback", "0.5"])
    assert told["accuracy"] > TRAINED
    assert 8 < told["bits"] < 8.2
    codec = custom_scheme.Bytes(bucket_size=100)
    flat = torch.randn(1050, generator=torch.Generator().manual_seed(3))
    decoded = torch.stack([codec.decode(codec.encode(flat, seed=i)) for i in range(400)])
    step = flat.abs().max() / 127
    assert float((decoded - flat).abs().max()) <= step
    assert float((decoded.mean(dim=0) - flat).abs().max()) < 6 * step / 2 / 400**0.5
    flat[150], flat[200:300] = torch.nan, 0.0
    got = codec.decode(codec.encode(flat, seed=1))
    assert bool(got[100:200].isnan().all()) and not bool(got[200:300].any())
    assert bool(got[:100].isfinite().all()) and bool(got[300:].isfinite().all())


def half(images: torch.Tensor, digits: torch.Tensor) -> list[TensorDataset]:
    """2,000 images for training, and 500 for the test."""
    parts = zip(split(images, digits), (2000, 500), strict=True)
    return [TensorDataset(*(tensor[:count] for tensor in part.tensors)) for part, count in parts]


def run_elastic(folder: Path) -> None:
    """Without anybody coming or going: stopped by the file, then on to the end, each image once."""
    elastic.split = half
    stop = folder / "stop"
    flags = [*QUICK, "--epochs", "1", "--batch-size", "64", "--lr", "0.02"]
    flags += ["--stop-file", str(stop)]
    flags += ["--checkpoint", str(folder / "elastic.pt")]
    stop.touch()
    hvd.barrier()
    first = elastic.main(flags)
    assert (first["step"], first["done"]) == (5, False)
    hvd.barrier()
    stop.unlink(missing_ok=True)
    hvd.barrier()
    second = elastic.main(flags)
    assert (second["step"], second["done"]) == (2000 // (64 * hvd.size()), True)
    assert second["accuracy"] > TRAINED


def check_help() -> None:
    """Each tells how it is started, and its flags."""
    for example in EXAMPLES:
        told, ended = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(told):
                example.main(["--help"])
        except SystemExit as error:
            ended = error.code
        assert ended == 0
        assert f"python examples/{example.__name__}.py" in told.getvalue(), example.__name__
        assert "--seed" in told.getvalue()
        assert ("--compression NAME" in told.getvalue()) == (example is not custom_scheme)


def printed(example, port: str, *words: str) -> str:
    """What it prints with these words, as a process that torchrun has started."""
    os.environ |= {
        "RANK": str(hvd.rank()),
        "LOCAL_RANK": str(hvd.rank()),
        "WORLD_SIZE": str(hvd.size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    sys.argv = [example.__file__, *words]
    instances.start_over()
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert not example.main()
    return told.getvalue()


def check_ddp_hook(told: str) -> None:
    """It learns, processes stay equal, about log2(7) bits travel."""
    assert "parameters equal on 2 processes" in told, told
    assert float(told.partition("accuracy ")[2].partition("%")[0]) > 60, told
    sent, bits = told.partition(" ms a step")[2].split("\n")[1].split(" bytes sent")
    assert 2.8 < float(bits.rsplit(",", 1)[1].split()[0]) < 3.1, told
    assert 10.5 < 4 * 431_080 / int(sent.replace(",", "")) < 32 / math.log2(7), told


def check_local_sgd(told: str) -> None:
    """Four rounds, of which the last one is shorter; it learns."""
    assert "after 4 rounds" in told, told
    assert float(told.partition("accuracy ")[2].partition("%")[0]) > 60, told
    # 4 of 32 bits, every 20th step.
    sent = int(told.rpartition(" rounds, ")[2].split()[0].replace(",", ""))
    assert 7.5 < 4 * 431_080 / 20 / sent < 8, told


def check_ppo(told: str) -> None:
    """The carts learn to stay at 0, with 3 of 32 bits."""
    rewards = [float(part.split(",")[0]) for part in told.split("reward ")[1:]]
    assert rewards[0] < -1 and rewards[-1] > -0.3, told


def check_fsdp2(told: str) -> None:
    """The transformer learns with 4 bits."""
    losses = [float(part.split()[0]) for part in told.split("loss ")[1:]]
    assert losses[0] > 5 and losses[-1] < 3, told
    sent = int(told.split(" bytes sent")[0].split()[-1].replace(",", ""))
    assert 7.5 < 4 * 470_000 / 2 / sent < 8.2, told  # float32 would send half of the gradients


DDP_HOOK = "--no-cuda", "--steps", "40", "--bucket-cap-mb", "0.5"
OF_TORCHRUN = (
    (check_ddp_hook, ddp_hook, DDP_HOOK),
    (check_local_sgd, local_sgd, ("--steps", "70", "--every", "20")),
    (check_ppo, ppo, ()),
    (check_fsdp2, fsdp2, ()),
)


def run_those_of_torchrun(ports: list[str]) -> None:
    """Checked when all have run: the other process would wait for this one."""
    output = [
        printed(example, port, *words)
        for port, (_, example, words) in zip(ports, OF_TORCHRUN, strict=True)
    ]
    if hvd.rank() == 0:
        for (check, _, _), told in zip(OF_TORCHRUN, output, strict=True):
            check(told)


def main(folder: Path, *ports: str) -> None:
    check_help()
    run_synthetic_benchmark()
    check_resnets()
    run_char_lstm()
    run_amp_clipping()
    run_resume(folder)
    run_custom_scheme()
    run_elastic(folder)
    hvd.barrier()
    run_those_of_torchrun(list(ports))
    print(f"rank {hvd.rank()}: all examples ran", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
