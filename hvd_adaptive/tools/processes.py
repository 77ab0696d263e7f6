"""Run a command under a time limit, and end every process that came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# Holds the marks of the jobs that a process belongs to. Launchers give ranks process groups and
# sessions of their own, and Open MPI's daemons leave their parents; environments are inherited.
MARKS = "HVD_ADAPTIVE_JOBS"
CHECK_S = 1.0
TEXTS: Any = {"capture_output": True, "text": True, "errors": "replace"}  # for subprocess.run
# After SIGTERM, and after a failure that should end the command by itself.
GRACE_S = 5.0


def search_path() -> str:
    """Return PATH with the programs of this Python environment first, even if it is not
    activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def output_of(*command: str) -> str:
    """Return what a command prints; "" if it fails, or does not end within 30 s."""
    try:
        done = subprocess.run(command, timeout=30, **TEXTS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


class Job:
    """A command that runs, and every process on this machine that came of it.

    Args:
        command: program and arguments.
        seconds: time limit, from now on.
        environment: of the command; this process's by default.
        folder: the command's working directory.
        output: file of its standard output and standard error; a temporary one by default.
    """

    def __init__(
        self,
        command: Sequence[str],
        seconds: float,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        output: Path | None = None,
    ) -> None:
        variables = os.environ if environment is None else environment
        self._mark = uuid.uuid4().hex
        marks = " ".join([*variables.get(MARKS, "").split(), self._mark])
        self._text = ""
        self._output: IO[bytes] = (
            output.open("w+b") if output else tempfile.TemporaryFile()  # noqa: SIM115
        )
        self.deadline = time.monotonic() + seconds
        try:
            self.process = subprocess.Popen(
                list(command),
                env={**variables, MARKS: marks},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            self._output.close()
            raise

    def wait(self, failed: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for the command's end, then end what is left of the job.

        Args:
            failed: checked about once a second. If it returns True, the command should end by
                itself, and has GRACE_S seconds to do so.

        Returns:
            The exit status. None if the command had to be ended.
        """
        deadline = self.deadline
        try:
            while True:
                left = deadline - time.monotonic()
                try:
                    return self.process.wait(max(0.0, min(CHECK_S, left)))
                except subprocess.TimeoutExpired:
                    if left <= 0:
                        return None
                if failed():
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        finally:
            self.end()

    def end(self) -> None:
        """End every process of the job.

        The command gets SIGTERM first: launchers pass it on to ranks on other machines.
        """
        try:
            if self.process.poll() is None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE_S)
        finally:
            self._kill()
            self.text()
            self._output.close()

    def text(self) -> str:
        """Return what the job has printed so far."""
        if not self._output.closed:
            # Not seek(): the command writes at the same file position.
            file = self._output.fileno()
            self._text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
        return self._text

    def pids(self) -> list[int]:
        """Return the processes of the job that run on this machine."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):  # it has ended, or is another user's
                    if self._mark.encode() in (folder / "environ").read_bytes():
                        found.append(int(folder.name))
        return found

    def _kill(self) -> None:
        """Kill until nothing is left: a process may start another one meanwhile."""
        deadline = time.monotonic() + GRACE_S
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
