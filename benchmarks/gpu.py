"""Everything that there is to know of a GPU, by one command of at most 8 minutes.

    python benchmarks/gpu.py --output gpu.json [--horovod FOLDER]

Needs CUDA, torch, Triton, SciPy and tqdm, and no network. Without Numba the suite is left out. Each
part's results are printed and written at once. Call it again to go on: parts that have ended well
are not repeated.

facts     the card, versions
equal     payloads of schemes that encode on the GPU, and what they decode to, against plain torch
          on the CPU, bit for bit (kernels/reference/), on sizes with partial buckets and blocks,
          with NaN and zeros
suite     test_cuda_*.py of tests/unit on the GPU, where pytest and what they need is there
large     more than 2**31 coordinates: the last buckets against plain torch
speed     encode and decode-and-accumulate against a device-to-device copy (`bench codec`)
latency   of one small group, header and checksum included: queueing it, and until it is done
ranks     two ranks that share the GPU, where --horovod names a folder with Horovod's sdist and
          what pip needs to build it; Horovod then stages their payloads through the host
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Seconds: of one of the commands at least, beyond the time that parts begin in, and for the parts
# behind ``speed``.
LEAST_S, SPARE_S, RESERVED_S = 20.0, 25.0, 120.0
STOPPED = 124  # the exit status of commands whose time was up
# What the suite needs.
TEST_MODULES = ("pytest", "pytest_timeout", "hypothesis", "numba")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu_checks import BITS, equal, large, sample  # noqa: E402

import hvd_adaptive  # noqa: E402
from hvd_adaptive.base.tensors import wait_for  # noqa: E402
from hvd_adaptive.tools.bench import codec  # noqa: E402
from hvd_adaptive.tools.launch import Ranks  # noqa: E402
from hvd_adaptive.tools.output import script_parser  # noqa: E402
from hvd_adaptive.tools.processes import Job  # noqa: E402


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the machine."""
    own: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if arguments.device.type == "cuda":
        import triton

        card = torch.cuda.get_device_properties(arguments.device)
        own |= {"card": card.name, "memory_GiB": round(card.total_memory / 2**30, 1)}
        own |= {"multiprocessors": card.multi_processor_count, "cuda": torch.version.cuda}
        own |= {"triton": triton.__version__}
    return own


def suite(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the tests of the kernels in a process of their own."""
    missing = [name for name in TEST_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return {"status": f"left out: no {', '.join(missing)} here"}
    files = sorted(str(path) for path in (ROOT / "tests/unit").rglob("test_cuda_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return finished(command, environment, arguments, lines=15)


def finished(
    command: list[str], environment: dict[str, str], arguments: argparse.Namespace, lines: int
) -> dict[str, Any]:
    """Run a command until the time is up; return its status, seconds and last lines."""
    begin = time.monotonic()
    seconds = max(LEAST_S, arguments.end + SPARE_S - begin)
    job = Job(command, seconds, environment=environment, folder=ROOT)
    status = job.wait()
    end = job.text().splitlines()[-lines:]
    seconds = time.monotonic() - begin
    return {"status": STOPPED if status is None else status, "s": seconds, "end": end}


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return {label: seconds of each action}, which are kept after each case."""
    options = codec.Options(
        table_bits=BITS,
        codings=("fixed",),
        coordinates=arguments.coordinates,
        rounds=arguments.rounds,
        device=arguments.device.type,
    )
    results = dict(arguments.results.get("speed", {}))
    for label, scheme in codec.cases(options).items():
        if label in results or time.monotonic() > arguments.end - RESERVED_S:
            continue
        try:
            results[label] = codec.measure(scheme.parts.default, label, options)
        except Exception as error:  # the other cases are still worth their time
            print(f"  {label}: {error!r}", flush=True)
            torch.cuda.empty_cache()
            continue
        print("  " + row(label, results[label], options.coordinates), flush=True)
        arguments.keep("speed", results)
    return results


def row(label: str, t: dict[str, float], coordinates: int) -> str:
    """Return a line of the table of docs/performance.md."""
    size = 4 * coordinates / 1e9
    return (
        f"| {label} | {t['bits']:.2f} | {size / t['encode']:.0f} | {t['memcpy'] / t['encode']:.2f} "
        f"| {size / t['decode']:.0f} | {t['memcpy'] / t['decode']:.2f} "
        f"| {1e3 * t['encode']:.3f} | {1e3 * t['checksum']:.3f} |"
    )


def latency(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the median microseconds of one group of 100,000 coordinates."""
    device, told = arguments.device, {}
    flat = sample(100_000, device)
    for scheme in (hvd_adaptive.ALQ(bits=3), hvd_adaptive.QSGD(bits=4), hvd_adaptive.SignSGD()):
        payload = scheme.encode(flat, seed=1)
        actions: dict[str, Callable[[], object]] = {
            "encode": lambda s=scheme: s.encode(flat, seed=1),
            "decode": lambda s=scheme, p=payload: s.decode(p),
        }
        for name, action in actions.items():
            times = [timed(action, device) for _ in range(50)][10:]
            queued, done = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
            told[f"{scheme.parts.default.name} {name}"] = {"queued_us": queued, "done_us": done}
    return told


def timed(action: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the seconds until an action returns, and until the device has done it."""
    wait_for(device)
    begin = time.perf_counter()
    action()
    queued = time.perf_counter() - begin
    wait_for(device)
    return queued, time.perf_counter() - begin


def ranks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run two ranks on one GPU; NCCL refuses to serve two, so payloads go through the host."""
    if arguments.horovod is None:
        return {"status": "left out: no --horovod"}
    here = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(arguments.horovod.resolve())}
    two = Ranks(2, "gloo")
    environment = two.environment() | here
    build = [sys.executable, "-m", "hvd_adaptive", "install-horovod", "--cuda", "no"]
    found = {"build": finished(build, environment, arguments, lines=12)}
    if found["build"]["status"] == 0:
        program = [sys.executable, str(ROOT / "benchmarks/gpu_ranks.py")]
        command = two.command([*program, "--device", str(arguments.device)])
        found["run"] = finished(command, environment, arguments, lines=12)
    return found


def table(results: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Return the Markdown for docs/performance.md."""
    known = results.get("facts", {})
    memcpy = statistics.median([t["memcpy"] for t in results.get("speed", {}).values()] or [1.0])
    lines = [
        f"{known.get('card', 'CPU')}, torch {known.get('torch')}, Triton {known.get('triton')}; "
        f"{arguments.coordinates:,} coordinates, bucket 8192; a device-to-device copy moves "
        f"{4e-9 * arguments.coordinates / memcpy:.0f} GB/s of float32.",
        "",
        "| scheme | bits | encode GB/s | / copy | decode+add GB/s | / copy | encode ms "
        "| checksum ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    speeds = results.get("speed", {}).items()
    lines += [row(label, t, arguments.coordinates) for label, t in speeds]
    return "\n".join(lines)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "facts": facts,
    "equal": equal,
    "large": large,
    "speed": speed,
    "latency": latency,
    "ranks": ranks,
    "suite": suite,
}


def main(words: list[str] | None = None) -> int:
    """Measure what is missing; return 1 if something differs or failed."""
    parser = script_parser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--horovod", type=Path, metavar="FOLDER")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--coordinates", type=int, default=100_000_000)
    parser.add_argument("--beyond", type=int, default=2**31, help="coordinates of `large`")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=450, help="begin no part after this time")
    arguments = parser.parse_args(words)
    if arguments.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch sees no GPU here")
    arguments.end = time.monotonic() + arguments.seconds
    results: dict[str, Any] = {}
    if arguments.output.exists():
        results = json.loads(arguments.output.read_text(encoding="utf-8"))

    def keep(name: str, result: Any) -> None:
        results[name] = result
        arguments.output.write_text(json.dumps(results, indent=1), encoding="utf-8")

    arguments.results, arguments.keep = results, keep
    for name in [name for name in PARTS if name in (arguments.parts or PARTS)]:
        begin = time.monotonic()
        ended = name in results and name != "speed" and not failed(results[name])
        if begin > arguments.end or ended:
            continue
        print(f"{name}:", flush=True)
        try:
            result = PARTS[name](arguments)
            if name != "speed":
                print("  " + json.dumps(result, indent=1).replace("\n", "\n  "), flush=True)
        except Exception as error:  # the other parts are still worth their time
            result = {"error": repr(error)}
            print(f"  {error!r}", flush=True)
            if name == "speed":  # it has kept what it measured
                continue
        keep(name, result)
        print(f"  {time.monotonic() - begin:.0f} s", flush=True)
    page = table(results, arguments)
    arguments.output.with_suffix(".md").write_text(page + "\n", encoding="utf-8")
    print(page)
    return int(any(failed(result) for result in results.values()))


def failed(result: dict[str, Any]) -> bool:
    """Return whether a part has failed."""
    stages = [part for part in result.values() if isinstance(part, dict) and part.get("status")]
    codes = result.get("status")
    return bool(
        "error" in result
        or result.get("differ")
        or result.get("equal") is False
        or stages
        or (isinstance(codes, int) and codes)
    )


if __name__ == "__main__":
    sys.exit(main())
