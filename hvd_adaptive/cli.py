"""The `hvd-adaptive` command.

Each subcommand lives beside what it does, in a module with one function `register(commands)`
that adds its parser and sets `run`, a function from the parsed arguments to an exit status. To add
one, name its module in `COMMANDS`. Such modules import what is slow only when they run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from hvd_adaptive._version import __version__

INTERRUPTED = 130  # as shells tell of Ctrl-C
COMMANDS = (
    "hvd_adaptive.horovod_build.command",
    "hvd_adaptive.doctor.command",
    "hvd_adaptive.commands.schemes",
    "hvd_adaptive.bench.command",
    "hvd_adaptive.plan.command",
    "hvd_adaptive.monitor.report.command",
)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command and all its subcommands."""
    parser = argparse.ArgumentParser(
        prog="hvd-adaptive", description="Adaptive gradient quantization for stock Horovod."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        importlib.import_module(module).register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:  # its reader has seen enough: `hvd-adaptive schemes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
