"""Run the build, write its log, show its progress."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from .plan import Plan

_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]\s*(.*)")
_POLL_S = 0.25
_EVERY_S = 15.0


def run_build(plan: Plan, environ: Mapping[str, str], log: Path, console: Console) -> int:
    """Run `plan`, write all its output to `log`, and return the exit status."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            plan.command,
            env=plan.full_environment(environ),
            cwd=plan.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # The build has its own process group, so that an interrupt ends the compilers too.
            start_new_session=True,
        )
        try:
            _follow(process, log, console)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    return process.returncode


def progress_of(lines: list[str]) -> tuple[int, str] | None:
    """Return the newest percentage that make printed, and the target that it was building."""
    for line in reversed(lines):
        match = _PERCENT.match(line)
        if match:
            return int(match[1]), _short(match[2])
    return None


def _short(step: str) -> str:
    """Shorten "Building CXX object a/b/operations.cc.o" to "operations.cc"."""
    words = step.split()
    if not words:
        return ""
    name = words[-1].rsplit("/", 1)[-1]
    return f"compiling {name.removesuffix('.o')}" if words[0] == "Building" else step


def _follow(process: subprocess.Popen[bytes], log: Path, console: Console) -> None:
    """Print the newest step from time to time, until ``process`` ends."""
    start = printed = time.monotonic()
    done, step, rest = 0, "fetching and configuring", ""
    with log.open("r", encoding="utf-8", errors="replace") as text:
        while process.poll() is None:
            time.sleep(_POLL_S)
            # The last piece may be half a line: keep it for the next round.
            *lines, rest = (rest + text.read()).split("\n")
            done, step = progress_of(lines) or (done, step)
            now = time.monotonic()
            if now - printed >= _EVERY_S:
                printed = now
                console.print(f"  {now - start:4.0f} s  {done:3d}%  {step}", highlight=False)
