"""Ranks over Gloo without a launcher, forked from a process that has imported everything: a start
takes 0.1 s instead of 5, and nobody but the ranks themselves ends them."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

from script_runs import environment

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["forked_imports"])
_HERE = str(Path(__file__).parent)


class Forked:
    """A rank; as much of subprocess.Popen as is used of one."""

    def __init__(self, program: Path, arguments: Sequence[str], own: dict[str, str], out: Path):
        _begin()
        self._process = _CONTEXT.Process(target=_work, args=(program, arguments, own, out))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None: it runs. Negative: the signal that ended it."""
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit status; None where it runs after so many seconds."""
        self._process.join(seconds)
        return self.returncode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def start(
    ranks: int, program: Path, arguments: Sequence[str], variables: Mapping[str, str], folder: Path
) -> list[Forked]:
    """Run a Python file on so many ranks, a job at a time; they print to ``folder``/<rank>.out."""
    shared = environment() | dict(variables)
    return [
        Forked(program, arguments, shared | own, folder / f"{rank}.out")
        for rank, own in enumerate(_meeting(ranks))
    ]


def run(
    ranks: int,
    program: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    seconds: float,
) -> str:
    """What the ranks print, once all have ended well; AssertionError otherwise."""
    started = start(ranks, program, arguments, variables, folder)
    try:
        codes = [rank.wait(seconds) for rank in started]
    finally:
        for rank in started:
            rank.kill()
    output = "".join((folder / f"{rank}.out").read_text() for rank in range(ranks))
    assert codes == [0] * ranks, f"exit codes {codes}\n{output}"
    return output


@functools.cache
def _begin() -> None:
    """Start what ranks are forked from, where its imports are found."""
    before = os.environ.copy()
    own = environment()
    os.environ.update(own | {"PYTHONPATH": os.pathsep.join([_HERE, own["PYTHONPATH"]])})
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _meeting(ranks: int) -> list[dict[str, str]]:
    """Environments of ranks that meet over Gloo, as horovodrun sets them."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

    slots = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    server, port = _server()
    server.init(slots)  # forgets an earlier job's
    shared = create_run_env_vars("127.0.0.1", ["lo"], port)
    return [{k: str(v) for k, v in (shared | create_slot_env_vars(s)).items()} for s in slots]


@functools.cache
def _server() -> tuple[Any, int]:
    """Where ranks find each other, and its port; until this process ends."""
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    return server, server.start()


def _work(program: Path, arguments: Sequence[str], own: dict[str, Any], out: Path) -> None:
    """The rank, in its own process."""
    import forked_imports  # noqa: F401  already there, or every start takes seconds
    import horovod.torch as hvd

    os.setsid()
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(own)
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.parent))
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        hvd.shutdown()  # as when a process of its own ends
