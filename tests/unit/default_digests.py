"""What every scheme makes of fixed tensors, as one digest a line: run by test_defaults.py under
other defaults of torch, which must change no bit."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator

import torch
from scheme_cases import schemes
from states import through_disk

from hvd_adaptive import Hierarchical, ScatterReduce, instances, simulate

CPU, F32 = torch.device("cpu"), torch.float32
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
N = 700
SCHEMES = schemes(
    *("qsgd-3", "qsgd-4-linf-clip2.5-huffman", "qsgd-4-elias", "nuqsgd-3", "terngrad", "alq-3"),
    *("alq-3-paper-n-normal", "alq-2-paper-gradient-huffman", "amq-3", "orq-5", "orq-5-descent"),
    *("orq-9-half-clip2.5", "quantile-5", "bingrad", "bingrad-biased", "bingrad-biased-iterated"),
    *("signsgd", "onebit-no-feedback", "natural", "qcs-gain8", "qcs-mmse", "sparse-0.1"),
    *("ecdq-2", "ecdq-variance0.1"),
)
# Whose states have residuals, tables, second stages and parts in them.
EXCHANGES = {
    "feedback": {"error_feedback": 0.5},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=4)},
    "hierarchical": {"exchange": Hierarchical(ranks_per_node=2, second_stage_bits=4)},
}


def numbers(count: int, seed: int, dtype: torch.dtype = F32) -> torch.Tensor:
    generator = torch.Generator(device=CPU).manual_seed(seed)
    return torch.randn(count, generator=generator, device=CPU, dtype=F32).pow(3).to(dtype)


def digest(value: object) -> int:
    """Of tensors, and what holds them; dtypes and devices count."""
    if isinstance(value, torch.Tensor):
        flat = torch.empty(value.numel(), dtype=value.dtype, device=CPU).copy_(value.reshape(-1))
        data = flat.view(torch.uint8).tolist()
        return zlib.crc32(bytes(data), zlib.crc32(f"{value.dtype} {value.device}".encode()))
    if isinstance(value, dict):
        value = [(str(name), of_name) for name, of_name in value.items()]
    if isinstance(value, list | tuple):
        return zlib.crc32(repr([digest(one) for one in value]).encode())
    return zlib.crc32(repr(value).encode())


def of_codec(make) -> Iterator[tuple[str, object]]:
    codec = make(bucket_size=128)
    if hasattr(codec, "fit"):
        codec.fit([numbers(300, 1), numbers(500, 2)])
    for dtype in DTYPES:
        flat = numbers(N, 3, dtype)
        payload = codec.encode(flat, seed=4)
        yield f"payload of {dtype}", payload
        yield f"decoded {dtype}", codec.decode(payload)
    yield "fresh", codec.encode(numbers(N, 3))
    other = make(bucket_size=128)
    other.load_state_dict(through_disk(codec.state_dict()))
    yield "state", other.state_dict()
    yield "after", other.decode(other.encode(numbers(N, 5)))


def of_training(make, **keywords) -> Iterator[tuple[str, object]]:
    """Three simulated steps, a state saved, loaded, and two steps more."""
    shapes = {"a": (40, 12), "b": (300,), "c": (7,)}
    for kind in (torch.float32, torch.float16):
        parameters = [
            (name, torch.nn.Parameter(torch.zeros(shape, dtype=kind, device=CPU)))
            for name, shape in shapes.items()
        ]
        codec = make(bucket_size=64, min_numel=20, **keywords)
        for life in range(2):
            if life:
                saved = through_disk(codec.state_dict())
                codec = make(bucket_size=64, min_numel=20, **keywords)
                codec.load_state_dict(saved)
            ranks = simulate.Ranks(parameters, codec, 4)
            for step in range(3 * life, 3 + 2 * life):
                for rank in range(4):
                    for slot, (_, p) in enumerate(parameters):
                        values = numbers(p.numel(), 100 * step + 10 * rank + slot, kind)
                        p.grad = values.view(p.shape)
                    ranks.take(rank)
                if ranks.due(step):
                    ranks.refit(step)
                ranks.average(step)
                codec.step = step + 1
                yield f"{kind} step {step}", [p.grad for _, p in parameters]
            yield f"{kind} variance", repr(ranks.variance(5 * life))
            yield f"{kind} state", codec.state_dict()
            yield f"{kind} residuals", [r.state_dict() for r in ranks.residuals]


def lines(part: int, of: int) -> Iterator[str]:
    """One scheme of ``of`` in turn, from number ``part`` on."""
    for name, make in list(SCHEMES.items())[part::of]:
        instances.start_over()  # random numbers that no other scheme has a part in
        cases = {"codec": lambda make=make: of_codec(make)}
        for label, more in EXCHANGES.items():
            cases[label] = lambda make=make, more=more: of_training(make, **more)
        for case, of_case in cases.items():
            try:
                for told, value in of_case():
                    yield f"{name} {case} {told} {digest(value):08x}"
            except Exception as error:  # the others are told, too
                yield f"{name} {case} {type(error).__name__}: {str(error).splitlines()[0]}"


def main(part: str, of: str, *defaults: str) -> None:
    """Print the lines under each of ``defaults``, "DTYPE DEVICE", each in a fork with no caches."""
    torch.set_num_threads(1)
    for default in defaults:
        sys.stdout.write(f"== {default}\n")
        sys.stdout.flush()
        child = os.fork()
        if not child:
            dtype, device = default.split()
            torch.set_default_dtype(getattr(torch, dtype))
            torch.set_default_device(device)
            sys.stdout.writelines(f"{line}\n" for line in lines(int(part), int(of)))
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
