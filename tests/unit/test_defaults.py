"""torch's defaults of dtype and device change no bit, and nothing fails under them.

As a program, print the digests of what schemes make of fixed tensors under other defaults.
"""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scheme_cases import EVERY, scheme
from simulated_steps import take_step
from states import plain, through_disk

import hvd_adaptive
from hvd_adaptive import Hierarchical, ScatterReduce, instances, simulate

PACKAGE = Path(hvd_adaptive.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
CPU, F32 = torch.device("cpu"), torch.float32
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALL = "HVD_ADAPTIVE_EVERY_CASE" in os.environ
# Fitted tables, bucket tables, ECDQ; all schemes with `make ranks`.
FEW = ("alq-3-paper-n-normal", "bingrad-biased-iterated", "ecdq-2")
MORE = (
    *("qsgd-4-linf-clip2.5-huffman", "qsgd-4-elias", "alq-2-paper-gradient-huffman", "qcs-mmse"),
    *("orq-5-descent", "orq-9-half-clip2.5", "bingrad-biased", "ecdq-variance0.1"),
)
# Whose states have residuals, tables, second stages and parts in them.
EXCHANGES: tuple[dict[str, Any], ...] = (
    {"error_feedback": 0.5},
    {"exchange": ScatterReduce(second_stage_bits=4)},
    {"exchange": Hierarchical(ranks_per_node=2, second_stage_bits=4)},
)


def numbers(count: int, seed: int, dtype: torch.dtype = F32) -> torch.Tensor:
    generator = torch.Generator(device=CPU).manual_seed(seed)
    return torch.randn(count, generator=generator, device=CPU, dtype=F32).pow(3).to(dtype)


def of_codec(make: Any) -> Iterator[object]:
    codec, other = (make(bucket_size=128) for _ in range(2))
    if hasattr(codec, "fit"):
        codec.fit([numbers(300, 1), numbers(500, 2)])
    for dtype in DTYPES:
        payload = codec.encode(numbers(700, 3, dtype), seed=4)
        yield from (payload, codec.decode(payload))
    yield codec.encode(numbers(700, 3))
    other.load_state_dict(through_disk(codec.state_dict()))
    yield from (other.state_dict(), other.decode(other.encode(numbers(700, 5))))


def of_training(make: Any, kind: torch.dtype, **keywords: Any) -> Iterator[object]:
    """Three simulated steps, a state saved, loaded, and two steps more."""
    shapes = {"a": (40, 12), "b": (300,), "c": (7,)}
    named = {
        name: torch.nn.Parameter(torch.zeros(shape, dtype=kind, device=CPU))
        for name, shape in shapes.items()
    }
    own, state = list(named.values()), None
    for steps in (range(3), range(3, 5)):
        codec = make(bucket_size=64, min_numel=20, **keywords)
        if state is not None:
            codec.load_state_dict(through_disk(state))
        ranks = simulate.Ranks(named.items(), codec, 4)
        for step in steps:
            seeds = itertools.count(100 * step)
            gradients = [
                [numbers(p.numel(), next(seeds), kind).view(p.shape) for p in own] for _ in range(4)
            ]
            yield take_step(ranks, step, own, gradients)
            codec.step = step + 1
        state = codec.state_dict()
        yield from (repr(ranks.variance(step)), state, [r.state_dict() for r in ranks.residuals])


def main(labels: str, *defaults: str) -> None:
    """Print digests under each of ``defaults``, "DTYPE DEVICE", each in a fork with no caches."""
    torch.set_num_threads(1)
    for default in defaults:
        print(f"== {default}", flush=True)
        child = os.fork()
        if not child:
            dtype, device = default.split()
            torch.set_default_dtype(getattr(torch, dtype))
            torch.set_default_device(device)
            for label in labels.split():
                instances.start_over()  # random numbers that no other scheme has a part in
                make = scheme(label)
                for case in (
                    of_codec(make),
                    *(of_training(make, k, **e) for k in DTYPES[:3:2] for e in EXCHANGES),
                ):
                    for value in case:
                        print(label, f"{zlib.crc32(repr(plain(value)).encode()):08x}", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("defaults", ["float16 meta", "float64 cpu"][: 1 + ALL])
def test_every_scheme_gives_the_same_bits(defaults):
    labels = (*EVERY, *MORE, *FEW) if ALL else FEW
    done = subprocess.run(
        [sys.executable, __file__, " ".join(labels), "float32 cpu", defaults],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (PACKAGE.parent, TESTS)))},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    usual, other = (one.splitlines()[1:] for one in done.stdout.split("== ")[1:])
    assert len(usual) > 40 * len(labels) and other == usual


# They follow torch's defaults where they are not told; from_numpy, frombuffer and *_like do not.
WITH_DTYPE = {"empty", "zeros", "ones", "full", "linspace", "logspace", "eye", "rand", "randn"}
WITH_DEVICE = WITH_DTYPE | {"tensor", "as_tensor", "asarray", "scalar_tensor", "arange", "randperm"}


def factories(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Calls of torch's factories in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if owner == "torch" and name in WITH_DEVICE:
                yield name, node


def test_no_tensor_is_made_with_a_default():
    """On GPUs and in rare branches, too, which the digests do not reach; but for commands, which
    run in processes of their own."""
    wanting, seen = [], 0
    for path in set(PACKAGE.rglob("*.py")) - set((PACKAGE / "tools").rglob("*.py")):
        for name, call in factories(path):
            given = {keyword.arg for keyword in call.keywords}
            needed = {"device", "dtype"} if name in WITH_DTYPE else {"device"}
            seen += 1
            if None not in given and not needed <= given:  # **HOST names both
                wanting.append((str(path.relative_to(PACKAGE)), call.lineno))
    assert seen > 80 and not wanting


if __name__ == "__main__":
    main(*sys.argv[1:])
