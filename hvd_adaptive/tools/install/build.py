"""Run a build in a folder of its own, show its progress, keep the wheel."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from .diagnose import MISSING, InstallError
from .recipe import Plan

_POLL_S, _EVERY_S = 0.25, 15.0


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


def _follow(process: subprocess.Popen[bytes], log: Path, console: Console) -> None:
    """Print make's newest percentage from time to time, until ``process`` ends."""
    start = printed = time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_S)
        now = time.monotonic()
        if now - printed >= _EVERY_S:
            printed = now
            step = progress_of(log.read_text(encoding="utf-8", errors="replace"))
            console.print(f"  {now - start:4.0f} s  {step}", markup=False)


def progress_of(log: str) -> str:
    """Return the newest line with a percentage: "12%  Building CXX object b.cc.o"."""
    steps = re.findall(r"^\s*\[\s*(\d+%)\]\s*(.*)", log, re.M)
    return "  ".join(steps[-1]) if steps else "fetching and configuring"


def wheel_root(chosen: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the folder of all kept wheels: `chosen`, else one in the user's cache folder."""
    if chosen is not None:
        return chosen.expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    # By the XDG convention, a path that is not absolute counts as not set.
    cache = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return cache / "hvd_adaptive" / "wheels"


def find_wheel(root: Path, key: str) -> Path | None:
    """Return the wheel kept under `key`, or None."""
    return next((root / key).glob("horovod-*.whl"), None)


def keep_wheel(root: Path, key: str, wheel: Path, log: Path) -> Path:
    """Move a new wheel and its log to where `find_wheel` looks; return its new path."""
    folder = root / key
    folder.mkdir(parents=True, exist_ok=True)
    log.replace(folder / "build.log")
    # The move is one rename within one file system: another process sees the whole wheel or none.
    return wheel.replace(folder / wheel.name)


@contextmanager
def build_folder(root: Path) -> Iterator[Path]:
    """Make a folder for one build; keep it for its log only if the build fails."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=root))
    except OSError as error:
        hint = "name a folder that you may write to with --wheel-dir"
        text = f"cannot write to {root}: {error}"
        raise InstallError(text, exit_code=MISSING, hints=[hint]) from error
    keep = False
    try:
        yield folder
    except InstallError as error:
        keep = error.log is not None
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
