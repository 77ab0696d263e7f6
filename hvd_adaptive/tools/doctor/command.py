"""Define `hvd-adaptive doctor`."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from hvd_adaptive.tools.output import (
    OK,
    PROBLEM,
    add_command,
    console,
    errors,
    positive,
    print_json,
)

HELP = "check that torch, MPI, Horovod and the kernels go together"
DESCRIPTION = """\
Check that everything here goes together: torch, MPI, Horovod and what it was
built with, mpi4py, and the compiled kernels. Two ranks on this machine exchange
compressed gradients, by mpirun and by horovodrun --gloo. For each fault the
command says what to do."""
EXIT_CODES = "exit status: 0 nothing is wrong, 1 there are problems, 2 wrong arguments"
MARKS = {
    "fine": "[green]fine   [/green]",
    "note": "[yellow]note   [/yellow]",
    "problem": "[bold red]problem[/bold red]",
}


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `hvd-adaptive` parser."""
    parser = add_command(commands, "doctor", run, HELP, DESCRIPTION, EXIT_CODES)
    add = parser.add_argument
    add("--timeout", type=positive, default=120, help="seconds for ranks (default: %(default)s)")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from rich.markup import escape

    from hvd_adaptive.tools.doctor.checks import examine

    out, findings = console(), []
    with errors().status("looking") as status:
        for finding in examine(arguments.timeout, status.update):
            findings.append(finding)
            if arguments.json:
                continue
            text = escape(f"{finding.subject}: {finding.text}")
            out.print(f"{MARKS[finding.status]} {text}", soft_wrap=True)
            for hint in finding.hints:
                out.print(f"        what to do: {hint}", markup=False, soft_wrap=True)
    problems = sum(finding.status == "problem" for finding in findings)
    if arguments.json:
        print_json({"problems": problems, "findings": [asdict(one) for one in findings]})
    elif not problems:
        out.print("nothing is wrong", style="green")
    return PROBLEM if problems else OK
