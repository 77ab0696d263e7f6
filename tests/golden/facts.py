"""What users, checkpoints and other ranks rely on, as plain data: run to print or to write it.

python tests/golden/facts.py --write    replaces golden.json

Only a deliberate change of a contract rewrites golden.json, and CHANGELOG.md then says so. Payloads
are of fixed tables, so that no fit's last digit, which differs between processors, is part of them.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import hvd_adaptive
from hvd_adaptive import Hierarchical, ScatterReduce, custom, instances, simulate
from hvd_adaptive.simulate import Ranks

GOLDEN = Path(__file__).with_name("golden.json")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
COORDINATES = 700

# Constructor calls by label. The labels are keys of golden.json.
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "QSGD": ("QSGD", {"bits": 3}),
    "QSGD linf huffman": ("QSGD", {"bits": 4, "norm": "linf", "coding": "huffman"}),
    "QSGD elias": ("QSGD", {"bits": 4, "coding": "elias"}),
    "QSGD symmetric": ("QSGD", {"bits": 2, "symmetric": True}),
    "NUQSGD": ("NUQSGD", {"bits": 3}),
    "TernGrad": ("TernGrad", {}),
    "ALQ": ("ALQ", {"bits": 3}),
    "ALQ paper": ("ALQ", {"bits": 3, "norm": "l2", "symmetric": True}),
    "ALQ zero": ("ALQ", {"bits": 4, "symmetric": False, "norm": "linf"}),
    "AMQ": ("AMQ", {"bits": 3}),
    "AMQ paper": ("AMQ", {"bits": 3, "norm": "l2", "symmetric": True}),
    "ORQ": ("ORQ", {"levels": 5}),
    "LinearQuantile": ("LinearQuantile", {"levels": 5}),
    "BinGrad": ("BinGrad", {}),
    "BinGrad biased": ("BinGrad", {"variant": "biased"}),
    "SignSGD": ("SignSGD", {}),
    "OneBitSGD": ("OneBitSGD", {}),
    "NaturalCompression": ("NaturalCompression", {}),
    "QCS": ("QCS", {"gain": 8.0}),
    "QCS mmse": ("QCS", {"estimator": "mmse"}),
    "SparseSGD": ("SparseSGD", {"density": 0.1}),
    "ECDQ": ("ECDQ", {"bits": 2}),
    "EDEN": ("EDEN", {"bits": 2}),
    "EDEN fine": ("EDEN", {"bits": 6}),
    "DRIVE": ("DRIVE", {}),
    "ECDQ variance": ("ECDQ", {"relative_variance": 0.1}),
}
# Symmetric tables contain no 0, so that payloads leave zeros out.
WITHOUT_ZERO: dict[str, tuple[str, dict[str, Any]]] = {
    label: SCHEMES[label] for label in ("QSGD symmetric", "ORQ", "SignSGD", "QCS", "ECDQ", "EDEN")
}
EXCHANGES: dict[str, dict[str, Any]] = {
    "allgather": {},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=4)},
    "hierarchical": {"exchange": Hierarchical(ranks_per_node=2, second_stage_bits=4)},
}
# States that hold more than a plain compressor's.
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "ALQ feedback": ("ALQ", {"bits": 3, "error_feedback": 0.5}),
    "ALQ huffman": ("ALQ", {"bits": 3, "coding": "huffman"}),
    "ALQ parts": ("ALQ", {"bits": 3, "parameter_bits": {"a": 5}}),
    "ALQ scatter_reduce": ("ALQ", {"bits": 3, "exchange": "scatter_reduce"}),
    "ALQ tensor": ("ALQ", {"bits": 3, "scope": "tensor"}),
}


def made(call: tuple[str, dict[str, Any]], **more: Any) -> Any:
    """The compressor of a constructor call, without error feedback unless the call names it."""
    instances.start_over()  # random numbers of training follow from the count of compressors
    name, keywords = call
    plain = {"error_feedback": None} if name == "OneBitSGD" else {}
    return getattr(hvd_adaptive, name)(**plain | keywords | more)


def numbers(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Heavy-tailed coordinates (``count``,), the same on every machine: hashed integers, cubed."""
    index = torch.arange(count, dtype=torch.int64, device="cpu") + 7919 * seed
    hashed = (index * 2654435761 + 12345) % 2**32 * 48271 % (2**31 - 1) % 4001 - 2000
    return (hashed.to(torch.float64) / 2000).pow(3).to(torch.float32).to(dtype)


def digest(*tensors: torch.Tensor) -> str:
    """SHA-256 of tensors' bytes, dtypes and shapes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def payloads() -> Iterator[tuple[str, str]]:
    """Digests of payloads and of what they decode to, for each scheme and dtype.

    Some coordinates of float16 are zero, and are rounded.
    """
    for label, call in SCHEMES.items():
        for dtype in DTYPES:
            compressor = made(call, bucket_size=128, keep_zeros=False)
            payload = compressor.encode(numbers(COORDINATES, 3, dtype), seed=4)
            name = f"{label} {str(dtype).removeprefix('torch.')}"
            yield name, f"{payload.numel()} {digest(payload)} {digest(compressor.decode(payload))}"


def averages() -> Iterator[tuple[str, str]]:
    """Digests of two steps' averages of 4 simulated ranks, for each scheme and exchange.

    A coordinate is zero, and is rounded.
    """
    zeros = {
        name: torch.zeros(shape, **HOST)
        for name, shape in (("a", (40, 12)), ("b", (300,)), ("c", (7,)))
    }
    for label, call in SCHEMES.items():
        for exchange, more in EXCHANGES.items():
            parameters = [(name, torch.nn.Parameter(own.clone())) for name, own in zeros.items()]
            more = more | {"bucket_size": 64, "min_numel": 20, "keep_zeros": False}
            ranks = Ranks(parameters, made(call, **more), 4)
            results = []
            for step in range(2):
                for rank in range(4):
                    for slot, (_, parameter) in enumerate(parameters):
                        values = numbers(parameter.numel(), 100 * step + 10 * rank + slot)
                        parameter.grad = values.view(parameter.shape)
                    ranks.take(rank)
                ranks.average(step)
                results += [parameter.grad.clone() for _, parameter in parameters]
            yield f"{label} {exchange}", digest(*results)


def zeros() -> Iterator[tuple[str, str]]:
    """Digests of payloads with zeros that are kept, and of what they decode to."""
    for label, call in WITHOUT_ZERO.items():
        compressor = made(call, bucket_size=128, keep_zeros=True)
        flat = numbers(COORDINATES, 3)
        flat[200:264], flat[::7] = 0.0, -0.0
        payload = compressor.encode(flat, seed=4)
        yield label, f"{payload.numel()} {digest(payload)} {digest(compressor.decode(payload))}"


def keys_of(state: Any) -> Any:
    """A state's keys, nested, with the types of its values."""
    if isinstance(state, dict):
        return {str(key): keys_of(value) for key, value in sorted(state.items(), key=str)}
    return type(state).__name__


def states() -> Iterator[tuple[str, Any]]:
    """Keys of each scheme's state_dict after one simulated update and step."""
    for label, call in (SCHEMES | STATEFUL).items():
        parameter = torch.nn.Parameter(torch.zeros(40, 30, **HOST))
        compressor = made(call, bucket_size=64, min_numel=20)
        ranks = Ranks([("a", parameter)], compressor, 2)
        for rank in range(2):
            parameter.grad = numbers(1200, rank).view(40, 30)
            ranks.take(rank)
        if ranks.due(0):
            ranks.refit(0)
        ranks.average(0)
        yield label, keys_of(compressor.state_dict())


def reports() -> Iterator[tuple[str, Any]]:
    """Keys of report()."""
    for label, call in SCHEMES.items():
        yield label, sorted(made(call).report())


def constructors() -> Iterator[tuple[str, Any]]:
    """Keywords and defaults of exported classes, and the shared keywords'."""
    for name in sorted(hvd_adaptive.__all__):
        value = getattr(hvd_adaptive, name)
        if inspect.isclass(value) and not issubclass(value, Exception):
            yield name, str(inspect.signature(value.__init__))
    shared = hvd_adaptive.QSGD().settings.shared()
    yield "shared", {key: repr(value) for key, value in sorted(shared.items())}


def members() -> Iterator[tuple[str, Any]]:
    """Public names that must not disappear: of compressors, of the package and its modules."""
    calls = ("compress", "decompress", "encode", "decode", "fit", "set", "report", "close")
    contract = (*calls, "state_dict", "load_state_dict", "levels", "parts", "settings", "step")
    for label in ("ALQ", "ECDQ", "QSGD"):
        compressor = made(SCHEMES[label])
        yield label, sorted(name for name in contract if hasattr(compressor, name))
    yield "package", sorted(hvd_adaptive.__all__)
    for module in (custom, simulate):
        yield module.__name__, sorted(module.__all__)


def options() -> Iterator[tuple[str, Any]]:
    """Option names of each command."""
    from hvd_adaptive.tools.cli import make_parser

    def walk(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, Any]]:
        yield name, sorted(o for a in parser._actions for o in a.option_strings or [str(a.dest)])
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for child, of_child in action.choices.items():
                    yield from walk(of_child, f"{name} {child}")

    yield from walk(make_parser(), "hvd-adaptive")


SECTIONS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "payloads": payloads,
    "averages": averages,
    "zeros": zeros,
    "states": states,
    "reports": reports,
    "constructors": constructors,
    "members": members,
    "options": options,
}


def facts(section: str) -> dict[str, Any]:
    """One section of golden.json, as the code is now."""
    return json.loads(json.dumps(dict(SECTIONS[section]())))


def text_of(golden: dict[str, dict[str, Any]]) -> str:
    """JSON that has one fact a line."""
    sections = []
    for section, of_section in golden.items():
        lines = [
            f"  {json.dumps(name, ensure_ascii=False)}: {json.dumps(fact, ensure_ascii=False)}"
            for name, fact in of_section.items()
        ]
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace golden.json")
    arguments = parser.parse_args()
    text = text_of({name: facts(name) for name in SECTIONS})
    if arguments.write:
        GOLDEN.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
