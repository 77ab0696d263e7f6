"""Jobs of which one rank dies or stops, and what must become of the others.

    python tests/parallel/accidents.py [--times 50] [--first 0]

Kills a rank at random points, in every phase, under every way to start ranks: mpirun, horovodrun
over Gloo, and Gloo without a launcher, where nobody ends the other ranks but themselves. Of each
job must hold: it ends within ``SECONDS`` of the death; no process of it is left; survivors end by
HorovodInternalError or by their launcher; every step that any rank took gave the parameters of a
job without accident. A number repeats its case: ``--first NUMBER --times 1``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as pytest does

import forked
import psutil
from script_runs import ROOT, environment
from tqdm import tqdm

from hvd_adaptive.tools import processes
from hvd_adaptive.tools.launch import Ranks

KINDS = ("mpi", "gloo", "alone")
STEPS = 12
START_SECONDS, SECONDS = 150, 60
# The last calls of each phase's function that a rank makes in so many steps, at least.
CALLS = {
    "backward": STEPS,
    "exchange": STEPS,
    "waiting": STEPS,
    "second stage": STEPS,
    "level fit": STEPS // 3,
}
PHASES = {
    "alq": (*CALLS, "any"),
    "bingrad": ("exchange", "second stage", "any"),
    "ecdq": ("second stage", "backward", "any"),
}


# A stack that ends in Horovod's own wait for an operation, which may be for ever. Stock Horovod can
# lose one that is enqueued while its background thread ends: who enqueues asks whether Horovod is
# shut down, and adds to a table that may have been cleared meanwhile.
LOST = re.compile(
    r'hread \S+.*\(most recent call first\):\n  File "[^"]*horovod/torch/mpi_ops\.py", line \d+ in '
)


@dataclass
class Job:
    """A job on its way, and what its ranks logged."""

    folder: str
    processes: Sequence[subprocess.Popen | forked.Forked]
    launched: processes.Job | None = None
    logs: list[list[dict[str, Any]]] = field(default_factory=list)

    def read(self) -> list[list[dict[str, Any]]]:
        """Each rank's lines; one that was being written is left out."""
        if not os.path.isdir(self.folder):
            return self.logs
        paths = sorted(Path(self.folder).glob("rank*.log"))
        lines = [path.read_text().split("\n")[:-1] for path in paths]
        self.logs = [[json.loads(line) for line in of_rank] for of_rank in lines]
        return self.logs

    def found(self, key: str) -> list[Any]:
        return [line[key] for log in self.read() for line in log if key in line]

    @property
    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def wait(self, met: Callable[[], Any], seconds: float, what: str) -> Any:
        """What ``met`` returns once it is true; AssertionError after so many seconds."""
        end = time.monotonic() + seconds
        while not (result := met()):
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not within {seconds} s\n{self.told()}")
            time.sleep(0.02)
        return result

    def told(self) -> str:
        """Logs, and output with the stacks of those that run, for a message."""
        for pid in self.found("pid"):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        output = [path.read_text()[-3000:] for path in sorted(Path(self.folder).glob("*.out"))]
        return "\n".join([*map(str, (log[-3:] for log in self.read())), *output])

    def end(self) -> None:
        """Kill what is left."""
        if self.launched is not None:
            self.launched.end()
        for process in self.processes:
            process.kill()
        shutil.rmtree(self.folder)


def start(kind: str, ranks: int, plan: dict[str, Any], gloo_seconds: int | None = None) -> Job:
    """Begin a job of ``victim.py``.

    gloo_seconds: how long ranks wait for each other, be it while they start. By default five where
    they start side by side, and nobody but they themselves ends those that survive.
    """
    gloo_seconds = gloo_seconds or (5 if kind == "alone" else 30)
    folder = tempfile.mkdtemp(prefix="accident")
    program = ROOT / "tests/parallel/ranks/victim.py"
    words = json.dumps(plan | {"folder": folder, "steps": STEPS})
    variables = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(gloo_seconds)}
    if kind == "alone":
        return Job(folder, forked.start(ranks, program, [words], variables, Path(folder)))
    command = Ranks(ranks, kind).command([sys.executable, str(program), words])
    own = {"environment": environment() | variables, "folder": ROOT}
    launched = processes.Job(command, math.inf, **own, output=Path(folder) / "0.out")
    return Job(folder, [launched.process], launched)


@lru_cache
def reference(scheme: str, ranks: int) -> tuple[list[str], float]:
    """Parameters after each step of a job without accident, and the seconds that its steps took."""
    job = start("alone", ranks, {"scheme": scheme})
    try:
        job.wait(lambda: job.found("step"), START_SECONDS, "start")
        begin = time.monotonic()
        job.wait(lambda: job.ended, START_SECONDS, "end")
        seconds = time.monotonic() - begin
        assert len(job.found("done")) == ranks, job.told()
        return [line["parameters"] for line in job.logs[0] if "step" in line], seconds
    finally:
        job.end()


def check_steps(job: Job, scheme: str, ranks: int) -> None:
    """Nobody went on with wrong parameters."""
    right, _ = reference(scheme, ranks)
    for rank, log in enumerate(job.read()):
        taken = [line["parameters"] for line in log if "step" in line]
        assert taken == right[: len(taken)], f"rank {rank} after {len(taken)} steps\n{job.told()}"


def check_nobody_left(job: Job) -> None:
    pids = job.found("pid")
    job.wait(lambda: not any(map(psutil.pid_exists, pids)), 30, "the end of every rank")


def blow(phase: str, signal: str = "SIGKILL", **when: float) -> dict[str, Any]:
    """What befalls a rank at its ``count``-th call of a phase, or ``seconds`` after its start."""
    return {"phase": phase, "signal": signal} | when


def kill(kind: str, ranks: int, plan: dict[str, Any]) -> tuple[str, float]:
    """One death. How the survivors ended ("launcher", an error's name, "too late" if the job ended
    first, or "lost" if Horovod lost an operation), and in how many seconds."""
    job = start(kind, ranks, plan)
    try:
        job.wait(lambda: job.ended or job.found("struck"), START_SECONDS, "the blow")
        if not job.found("struck"):
            assert len(job.found("done")) == ranks, job.told()
            return "too late", 0.0
        try:
            job.wait(lambda: job.ended, SECONDS, "the end of the survivors")
        except AssertionError as error:
            if LOST.search(str(error)):
                return "lost", float(SECONDS)
            raise
        seconds = time.time() - job.found("struck")[0]
        check_nobody_left(job)
        check_steps(job, plan["scheme"], ranks)
        if job.found("done"):  # all had what they needed for the last step
            return "too late", seconds
        codes = [process.returncode for process in job.processes]
        assert any(codes) if kind != "alone" else all(codes), f"exit codes {codes}\n{job.told()}"
        errors = job.found("error")
        assert set(errors) <= {"HorovodInternalError"}, job.told()
        if kind == "alone":
            assert len(errors) == ranks - 1, job.told()
        return next(iter(errors), "launcher"), seconds
    finally:
        job.end()


def pause(
    kind: str,
    ranks: int,
    plan: dict[str, Any],
    until: Callable[[Job], bool],
    after: int,
    gloo_seconds: int,
) -> Job:
    """A rank stops, and gets the signal ``after`` when ``until`` holds; the job, once it has ended.
    gloo_seconds: see ``start``.

    A rank that continues after its fellows gave up may wait for ever in stock Horovod, whose
    background thread has ended.
    """
    job = start(kind, ranks, plan, gloo_seconds)
    try:
        job.wait(lambda: job.found("struck"), START_SECONDS, "the blow")
        victim = job.logs[plan["rank"]][0]["pid"]
        job.wait(lambda: psutil.Process(victim).status() == "stopped", 30, "the stop")
        job.wait(lambda: until(job), SECONDS, "what the pause waits for")
        os.kill(victim, after)
        job.wait(lambda: job.ended, SECONDS, "the end")
        check_nobody_left(job)
        check_steps(job, plan["scheme"], ranks)
        return job
    finally:
        job.end()


def drawn(number: int) -> tuple[str, int, dict[str, Any]]:
    rng = random.Random(number)
    scheme = rng.choices(list(PHASES), weights=(3, 1, 1))[0]
    phase, ranks = rng.choice(PHASES[scheme]), rng.choice((2, 2, 3))
    if phase == "any":
        # From the start of the optimizer to the last step, or soon after it.
        own = blow(phase, seconds=rng.uniform(0, reference(scheme, ranks)[1]))
    else:
        own = blow(phase, count=rng.randrange(CALLS[phase]))
    plan = {"scheme": scheme, "rank": rng.randrange(ranks), "blows": [own]}
    return KINDS[number % len(KINDS)], ranks, plan


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args(words)
    ends: Counter[str] = Counter()
    slowest, lost = 0.0, 0
    for number in tqdm(range(args.first, args.first + args.times), unit="death"):
        kind, ranks, plan = drawn(number)
        try:
            end, seconds = kill(kind, ranks, plan)
        except AssertionError as error:
            raise SystemExit(f"number {number}, {kind}, {ranks} ranks, {plan}: {error}") from None
        what = f"{kind:7} {plan['blows'][0]['phase']:13} {end}"
        tqdm.write(f"{number:4} {ranks} ranks {plan['scheme']:8} {what} after {seconds:.1f} s")
        ends[what] += 1
        slowest, lost = max(slowest, seconds), lost + (end == "lost")
    for told, count in sorted(ends.items()):
        print(f"{count:4} x {told}")
    print(f"{args.times} deaths; the last survivor ended {slowest:.1f} s after it at most")
    if lost > 1:
        raise SystemExit(f"{lost} survivors waited in Horovod for ever, which is rare")


if __name__ == "__main__":
    main()
