"""Define `hvd-adaptive doctor`."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from hvd_adaptive.tools.output import OK, PROBLEM, console, errors, positive, print_json

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
    parser = commands.add_parser(
        "doctor",
        help="check that torch, MPI, Horovod and the kernels go together",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--timeout", type=positive, default=120, help="seconds for ranks (default: %(default)s)")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


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
            out.print(
                f"{MARKS[finding.status]} {escape(f'{finding.subject}: {finding.text}')}",
                soft_wrap=True,
            )
            for hint in finding.hints:
                out.print(f"        what to do: {hint}", markup=False, soft_wrap=True)
    problems = sum(finding.status == "problem" for finding in findings)
    if arguments.json:
        print_json({"problems": problems, "findings": [asdict(one) for one in findings]})
    elif not problems:
        out.print("nothing is wrong", style="green")
    return PROBLEM if problems else OK
