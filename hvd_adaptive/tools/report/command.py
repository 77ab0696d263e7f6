"""Define `hvd-adaptive report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_adaptive.tools.output import OK, PROBLEM, add_command, errors, print_failure, print_json

HELP = "make a page of a training run from its monitor's log"
DESCRIPTION = """\
Make a page of a training run: bytes per step, compression ratio, relative
error, level tables over time, where the time goes, and which parameters cost
most. The page is one HTML file that needs no network. The run's compressor
must have had a monitor:

    ALQ(bits=3, monitor=hvd_adaptive.Monitor("runs/1"))

    hvd-adaptive report runs/1 && xdg-open runs/1/report.html"""
EXIT_CODES = """\
exit status: 0 written, 1 there is no log, the page cannot be written or
matplotlib is missing, 2 wrong arguments"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `hvd-adaptive` parser."""
    parser = add_command(commands, "report", run, HELP, DESCRIPTION, EXIT_CODES)
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="the monitor's folder, or one .jsonl file")
    add("--output", metavar="FILE", help="- is standard output (default: report.html in RUN_DIR)")
    add("--title", help="of the page (default: the end of the folder's path)")
    add("--json", action="store_true", help="print the figures as JSON instead of making a page")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    source: Path = arguments.run_dir
    if not source.exists():  # before imports that take seconds
        print_failure(FileNotFoundError(f"{source}: there is no such file or folder"))
        return PROBLEM

    from hvd_adaptive.monitor.log import LogError, read_logs
    from hvd_adaptive.tools.report.summary import describe

    try:
        logs = read_logs(source)
        if arguments.json:
            print_json([describe(log) for log in logs])
            return OK
        folder = source if source.is_dir() else source.parent
        output = arguments.output or folder / "report.html"
        title = arguments.title or "/".join(folder.resolve().parts[-2:]).lstrip("/")
        from hvd_adaptive.tools.report.page import page

        text = page(logs, title)
        if output == "-":
            print(text)
        else:
            Path(output).write_text(text, encoding="utf-8", errors="replace")
    except LogError as error:
        print_failure(error)
        return PROBLEM
    except ImportError as error:
        extra = "python -m pip install 'hvd-adaptive[report]', or use --json"
        print_failure(ImportError(f"{error}: drawing needs matplotlib and jinja2: {extra}"))
        return PROBLEM
    console = errors()
    for log in logs:
        for warning in log.warnings:
            console.print(f"warning: {warning['text']}", style="yellow", markup=False)
    console.print(f"{sum(len(log.steps) for log in logs)} records read", markup=False)
    if output != "-":
        print(output)
    return OK
