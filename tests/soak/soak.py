"""Kill and restart workers of an elastic training for half an hour, and see that nothing is wrong.

    make soak           or: python tests/soak/soak.py --minutes 5 --folder /tmp/soak

Every 50 steps chance decides: a worker is killed (SIGKILL) and another started in its place, or two
are; a host is taken away, and a new one added at once, or 50 steps later; or nothing happens. After
every recovery, and every 50 steps, workers compare their parameters bit for bit. At the end: no
worker that lived long has grown (memory, threads, open files), and nothing is left in /dev/shm.

Names of this machine stand in for hosts: 127.0.0.1 has many (127.0.00.1, ...). FOLDER/log.jsonl
holds what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hvd_adaptive.tools.processes import Job, search_path

STEPS = 50
# Seconds without a step after which a soak has failed; and for which workers must live until their
# growth is judged, from SETTLED seconds of their lives on.
LONGEST_PAUSE, LONG_LIFE, SETTLED = 120.0, 150.0, 60.0
MOST_GROWTH = {"rss": 96 * 2**20, "threads": 8, "files": 24}
EVENTS = {"kill": 5, "kill two": 1, "move a host": 2, "take a host away": 2, "nothing": 1}
LEAVING = {"kill": 1, "kill two": 2, "move a host": 1, "take a host away": 1, "nothing": 0}
Entries = list[dict[str, Any]]


class Soak:
    """A training, and what is done to it."""

    def __init__(self, folder: Path, ranks: int, scheme: str, seed: int) -> None:
        self.folder, self.workers, self.ranks = folder, folder / "workers", ranks
        self.random = random.Random(seed)
        self._names = host_names()
        self.counts = dict.fromkeys(EVENTS, 0)
        shutil.rmtree(self.workers, ignore_errors=True)
        self.workers.mkdir(parents=True)
        (folder / "stop").unlink(missing_ok=True)
        self.hosts = [next(self._names) for _ in range(ranks)]
        self._write_hosts()
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        script.chmod(0o755)
        command = f"horovodrun -np {ranks} --min-np 1 --max-np {ranks} --network-interface lo"
        worker = [sys.executable, str(Path(__file__).with_name("worker.py")), str(folder), scheme]
        environment = os.environ | {"PATH": search_path(), "OMP_NUM_THREADS": "1"}
        self.job = Job(
            [*command.split(), "--host-discovery-script", str(script), *worker],
            math.inf,
            environment=environment,
            output=folder / "output.txt",
        )

    def entries(self) -> Entries:
        """Return what workers have written so far, in the order of time."""
        texts = [path.read_text() for path in self.workers.glob("*.log")]
        lines = [line for text in texts for line in text.splitlines() if line[-1:] == "}"]
        return sorted(map(json.loads, lines), key=lambda entry: entry["time"])

    def steps(self) -> int:
        """Return the steps of the training so far."""
        return max((entry["batch"] for entry in self.entries()), default=0)

    def act(self) -> str:
        """Do what chance decides, and return it."""
        event = self.random.choices(list(EVENTS), list(EVENTS.values()))[0]
        if event == "take a host away" and self._working() != set(self.hosts):
            # Horovod 0.28.1 (State.on_reset) forgets, while it resets, that hosts were added. If it
            # hears of a removal next, old workers skip the sync that new ones wait in, for ever.
            event = "nothing"
        self.counts[event] += 1
        time.sleep(self.random.uniform(0, 2))  # in the middle of whatever it is
        leaving = self.random.sample(self.hosts, min(LEAVING[event], len(self.hosts) - 1))
        if event.startswith("kill"):
            for host in leaving:
                self._signal(host, signal.SIGKILL)
        self.hosts = [host for host in self.hosts if host not in leaving]
        if event != "take a host away":
            self.hosts += [next(self._names) for _ in range(self.ranks - len(self.hosts))]
        self._write_hosts()
        return event

    def show_stacks(self) -> None:
        """Have the workers write their stacks into output.txt."""
        for path in self.workers.iterdir():
            if path.suffix != ".log":
                self._signal(path.name, signal.SIGUSR1)
        time.sleep(2.0)

    def _working(self) -> set[str]:
        """Return the hosts of the workers that compared their parameters last."""
        found = self.entries()
        return {entry["host"] for entry in found[-found[-1]["size"] :]} if found else set()

    def _signal(self, host: str, number: signal.Signals) -> None:
        # A worker may not have written its file yet, or may have ended.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.workers / host).read_text()), number)

    def _write_hosts(self) -> None:
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}:1\n" for host in self.hosts))
        new.replace(self.folder / "hosts")  # the discovery script never sees half of it


def host_names() -> Iterator[str]:
    """Yield names of this machine, each once: Horovod shuns hosts whose worker failed."""
    for number in range(2_500):  # parts of 64 characters are too long for Python's sockets
        yield f"127.{'0' * (1 + number // 50)}.{'0' * (1 + number % 50)}.1"


def lives(entries: Entries) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the entries of each worker that lived long: when it had settled, and the last."""
    for pid in dict.fromkeys(entry["pid"] for entry in entries):
        own = [entry for entry in entries if entry["pid"] == pid]
        begin, last = own[0]["time"], own[-1]
        if last["time"] - begin >= LONG_LIFE:
            yield next(entry for entry in own if entry["time"] - begin >= SETTLED), last


def faults_of(entries: Entries) -> list[str]:
    """Return what is wrong according to the workers."""
    unequal = [entry for entry in entries if not entry["equal"]]
    faults = [f"parameters differ at step {e['batch']} on {e['host']}" for e in unequal]
    for settled, last in lives(entries):
        for figure, most in MOST_GROWTH.items():
            growth = last[figure] - settled[figure]
            if growth > most:
                lived = last["time"] - settled["time"]
                faults.append(f"worker {last['pid']}: {figure} grew by {growth} in {lived:.0f} s")
    losses = [entry["loss"] for entry in entries if entry["loss"] is not None]
    if len(losses) >= 8 and not sum(losses[-4:]) < sum(losses[:4]):
        faults.append(f"the loss did not fall: {losses[:4]} to {losses[-4:]}")
    return faults


def growth_of(entries: Entries) -> list[float]:
    """Return the MiB a minute by which each worker that lived long has grown."""
    return [
        60 * (last["rss"] - settled["rss"]) / 2**20 / max(last["time"] - settled["time"], 1.0)
        for settled, last in lives(entries)
    ]


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    return {path.name for path in Path("/dev/shm").glob("*")}


def left_behind(names: set[str]) -> list[str]:
    """Return those of /dev/shm that no living process uses: others may run here, too."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            used += maps.read_text()
    return sorted(name for name in names if f"/dev/shm/{name}" not in used)


def watch(soak: Soak, seconds: float, note: Callable[..., None]) -> list[str]:
    """Act every 50 steps until the time is over; return what went wrong."""
    begin = last_step = time.time()
    reached = acted = 0
    with tqdm(total=round(seconds), unit="s", disable=None) as bar:
        while time.time() < begin + seconds:
            time.sleep(1.0)
            steps = soak.steps()
            if steps > reached:
                reached, last_step = steps, time.time()
            bar.update(min(round(time.time() - begin), bar.total) - bar.n)
            bar.set_postfix_str(f"{reached} steps, {soak.counts}")
            if (status := soak.job.process.poll()) is not None:
                return [f"the training ended with status {status}; see output.txt"]
            if time.time() > last_step + LONGEST_PAUSE:
                soak.show_stacks()
                return [f"no step for {LONGEST_PAUSE:.0f} s; see output.txt"]
            if steps >= acted + STEPS:
                acted = steps
                note(event=soak.act(), step=steps)
    (soak.folder / "stop").touch()
    soak.job.deadline = time.monotonic() + LONGEST_PAUSE
    status = soak.job.wait()
    return faults_of(soak.entries()) + ([f"the launcher: status {status}"] if status != 0 else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--scheme", default="alq", help="alq, qsgd, signsgd, ecdq or none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no worker behind
    before = shared_memory()
    soak = Soak(folder, options.ranks, options.scheme, options.seed)
    with (folder / "log.jsonl").open("w") as log:

        def note(**entry: Any) -> None:
            log.write(json.dumps({"time": time.time()} | entry) + "\n")
            log.flush()

        note(event="begin", scheme=options.scheme, ranks=options.ranks, seed=options.seed)
        try:
            faults = watch(soak, 60 * options.minutes, note)
        finally:
            soak.job.end()
        left = left_behind(shared_memory() - before)
        faults += [f"left in /dev/shm: {', '.join(left)}"] if left else []
        entries, steps = soak.entries(), soak.steps()
        recoveries = sum(e["event"] == "begin" and e["rank"] == 0 for e in entries) - 1
        note(event="end", faults=faults, recoveries=recoveries, counts=soak.counts, steps=steps)
    print(f"{recoveries} recoveries, {soak.counts}; {steps} steps; {folder}/log.jsonl")
    if growths := ", ".join(f"{growth:.1f}" for growth in growth_of(entries)):
        print(f"memory of workers that lived long, MiB a minute: {growths}")
    for fault in faults:
        print("FAULT:", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
