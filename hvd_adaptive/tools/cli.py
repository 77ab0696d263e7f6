"""Define the `hvd-adaptive` command.

Each subcommand is a package of its own. Its module `command` has a function `register(commands)`
that adds the subcommand's parser and sets `run`, a function from the parsed arguments to an exit
status. To add a subcommand, add its module to `COMMANDS`. These modules import what is slow only
when they run.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from hvd_adaptive._version import __version__
from hvd_adaptive.tools import output
from hvd_adaptive.tools.bench import command as bench
from hvd_adaptive.tools.doctor import command as doctor
from hvd_adaptive.tools.install import command as install
from hvd_adaptive.tools.plan import command as plan
from hvd_adaptive.tools.report import command as report
from hvd_adaptive.tools.schemes import command as schemes

INTERRUPTED = 130  # as shells report Ctrl-C
COMMANDS = (install, doctor, schemes, bench, plan, report)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command and of all its subcommands."""
    parser = argparse.ArgumentParser(
        prog="hvd-adaptive",
        description="Gradient compression for PyTorch's DDP, FSDP2 and stock Horovod.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack a name's accents, or µ
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            arguments = make_parser().parse_args(argv)
            return arguments.run(arguments)
        finally:
            _flush()
    except BrokenPipeError:  # the reader has seen enough: `hvd-adaptive schemes | head`
        status = output.OK
    except OSError as error:  # standard output's disk is full, or a file cannot be written
        where = "" if error.filename is None else f"{error.filename}: "
        output.print_failure(OSError(f"{where}{error.strerror or error}"))
        status = output.PROBLEM
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        _flush()
    except OSError:  # Python would try again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _flush() -> None:
    """Flush standard output, which may be closed."""
    print(end="", flush=True)
