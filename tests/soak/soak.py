"""Kill and restart workers of an elastic training for half an hour, and see that nothing is wrong.

    make soak           or: python tests/soak/soak.py --minutes 5 --folder /tmp/soak

Every 50 steps chance decides: a worker is killed (SIGKILL) and another started in its place, or two
are; a host is taken away, and a new one added at once, or 50 steps later; or nothing happens. After
every recovery, and every 50 steps, workers compare their parameters bit for bit. At the end: no
worker that lived long has grown (memory, threads, open files), and nothing is left in /dev/shm.

Names of this machine stand in for hosts: 127.0.0.1 has as many as one likes (127.0.00.1, ...).

FOLDER/log.jsonl holds what was done. A soak that was cut off goes on, with a new training, until
the minutes of all its parts are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
STEPS = 50
# Seconds without a step after which a soak has failed; and for which workers must live to be asked
# whether they grew, from GROWN_FROM seconds of their lives on.
LONGEST_PAUSE, LONG_LIFE, SETTLED = 120.0, 150.0, 60.0
MOST_GROWTH, MOST_THREADS, MOST_FILES = 96 * 2**20, 8, 24
EVENTS = {"kill": 5, "kill two": 1, "move a host": 2, "take a host away": 2, "nothing": 1}
LEAVING = {"kill": 1, "kill two": 2, "move a host": 1, "take a host away": 1, "nothing": 0}


class Soak:
    """One part of a soak: a training, and what is done to it."""

    def __init__(self, folder: Path, ranks: int, scheme: str, seed: int) -> None:
        self.folder, self.ranks, self.scheme = folder, ranks, scheme
        self.random = random.Random(seed)
        self.hosts: list[str] = []
        self._names = self._host_names()
        self.counts = dict.fromkeys(EVENTS, 0)

    def start(self) -> None:
        """Begin a training on as many hosts as ranks."""
        shutil.rmtree(self.folder / "workers", ignore_errors=True)
        (self.folder / "workers").mkdir(parents=True)
        (self.folder / "stop").unlink(missing_ok=True)
        self.hosts = [next(self._names) for _ in range(self.ranks)]
        self._write_hosts()
        script = self.folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self.folder}/hosts\n")
        script.chmod(0o755)
        command = [
            str(BIN / "horovodrun"),
            "-np",
            str(self.ranks),
            "--min-np",
            "1",
            "--max-np",
            str(self.ranks),
            "--network-interface",
            "lo",
            "--host-discovery-script",
            str(script),
            sys.executable,
            str(HERE / "worker.py"),
            str(self.folder),
            self.scheme,
        ]
        output = (self.folder / "output.txt").open("a")
        self.process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ
            | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        )

    def entries(self) -> list[dict[str, Any]]:
        """What workers have told so far, in the order of time."""
        found = []
        for path in (self.folder / "workers").glob("*.log"):
            found += [
                json.loads(line) for line in path.read_text().splitlines() if line[-1:] == "}"
            ]
        return sorted(found, key=lambda entry: entry["time"])

    def steps(self) -> int:
        """How far the training has come."""
        return max((entry["batch"] for entry in self.entries()), default=0)

    def act(self) -> str:
        """Do what chance decides; what it was."""
        event = self.random.choices(list(EVENTS), list(EVENTS.values()))[0]
        if event == "take a host away" and self._working() != set(self.hosts):
            # Horovod 0.28.1 (State.on_reset) forgets, while it resets, that hosts were added. Told
            # of a removal next, old workers skip the sync that the new ones wait in, for ever.
            event = "nothing"
        self.counts[event] += 1
        time.sleep(self.random.uniform(0, 2))  # in the middle of whatever it is
        leaving = self.random.sample(self.hosts, min(LEAVING[event], len(self.hosts) - 1))
        if event.startswith("kill"):
            for host in leaving:
                self._kill(host)
        self.hosts = [host for host in self.hosts if host not in leaving]
        if event != "take a host away":
            self.hosts += [next(self._names) for _ in range(self.ranks - len(self.hosts))]
        self._write_hosts()
        return event

    def stop(self) -> int:
        """Let the training come to its end; the launcher's exit status."""
        (self.folder / "stop").touch()
        try:
            return self.process.wait(timeout=LONGEST_PAUSE)
        except subprocess.TimeoutExpired:
            self.kill_all()
            return -1

    def kill_all(self) -> None:
        """End the launcher and all workers that it started."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in [psutil.Process(self.process.pid), *family]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def _working(self) -> set[str]:
        """Hosts of the workers that compared their parameters last."""
        told = self.entries()
        return {e["host"] for e in told[-told[-1]["size"] :]} if told else set()

    def show_stacks(self) -> None:
        """Have the workers write into output.txt where they are."""
        for path in (self.folder / "workers").iterdir():
            if path.suffix != ".log":
                self._signal(path.name, signal.SIGUSR1)
        time.sleep(2.0)

    def _kill(self, host: str) -> None:
        self._signal(host, signal.SIGKILL)

    def _signal(self, host: str, number: signal.Signals) -> None:
        path = self.folder / "workers" / host
        if path.exists():  # it may not have come so far
            try:
                os.kill(int(path.read_text()), number)
            except ProcessLookupError:
                return

    def _write_hosts(self) -> None:
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}:1\n" for host in self.hosts))
        new.replace(self.folder / "hosts")  # the discovery script never sees half of it

    def _host_names(self) -> Iterator[str]:
        """Names of this machine, each given once: Horovod shuns hosts whose worker failed."""
        for number in range(2_500):  # parts of 64 characters are too long for Python's sockets
            yield f"127.{'0' * (1 + number // 50)}.{'0' * (1 + number % 50)}.1"


def faults_of(entries: list[dict[str, Any]]) -> list[str]:
    """What is wrong with what workers told."""
    faults = [
        f"parameters differ at step {e['batch']} on {e['host']}" for e in entries if not e["equal"]
    ]
    by_worker: dict[int, list[dict[str, Any]]] = {}
    for entry in entries:
        by_worker.setdefault(entry["pid"], []).append(entry)
    for pid, told in by_worker.items():
        if told[-1]["time"] - told[0]["time"] < LONG_LIFE:
            continue
        settled = next(e for e in told if e["time"] - told[0]["time"] >= SETTLED)
        for figure, most in (
            ("rss", MOST_GROWTH),
            ("threads", MOST_THREADS),
            ("files", MOST_FILES),
        ):
            growth = told[-1][figure] - settled[figure]
            if growth > most:
                lived = told[-1]["time"] - settled["time"]
                faults.append(f"worker {pid}: {figure} grew by {growth} in {lived:.0f} s")
    losses = [e["loss"] for e in entries if e["loss"] is not None]
    if len(losses) >= 8 and not sum(losses[-4:]) < sum(losses[:4]):
        faults.append(f"the loss did not fall: {losses[:4]} to {losses[-4:]}")
    return faults


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def left_behind(names: set[str]) -> list[str]:
    """Those of /dev/shm that no living process uses: others may run here, too."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            used += maps.read_text()
        except OSError:  # gone, or another user's
            continue
    return sorted(name for name in names if f"/dev/shm/{name}" not in used)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--scheme", default="alq", help="alq, qsgd, signsgd, ecdq or none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "log.jsonl"
    past = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = sum(entry.get("seconds", 0.0) for entry in past)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no worker behind
    before = shared_memory()
    soak = Soak(folder, options.ranks, options.scheme, options.seed + len(past))
    with path.open("a") as log:

        def note(**entry: Any) -> None:
            log.write(json.dumps({"time": time.time()} | entry) + "\n")
            log.flush()

        note(event="begin", scheme=options.scheme, ranks=options.ranks, seed=options.seed)
        soak.start()
        try:
            faults = watch(soak, 60 * options.minutes - done, note)
        finally:
            soak.kill_all()
        left = left_behind(shared_memory() - before)
        faults += [f"left in /dev/shm: {', '.join(left)}"] if left else []
        entries, steps = soak.entries(), soak.steps()
        recoveries = sum(e["event"] == "begin" and e["rank"] == 0 for e in entries) - 1
        note(event="end", faults=faults, recoveries=recoveries, counts=soak.counts, steps=steps)
    print(f"{recoveries} recoveries, {soak.counts}; {steps} steps; {path}")
    growths = ", ".join(f"{growth:.1f}" for growth in growth_of(entries))
    if growths:
        print(f"memory of workers that lived long, MiB a minute: {growths}")
    for fault in faults:
        print("FAULT:", fault)
    return 1 if faults else 0


def growth_of(entries: list[dict[str, Any]]) -> list[float]:
    """MiB a minute of each worker that lived long, once it had settled."""
    growths = []
    for pid in dict.fromkeys(entry["pid"] for entry in entries):
        told = [entry for entry in entries if entry["pid"] == pid]
        settled = [e for e in told if e["time"] - told[0]["time"] >= SETTLED]
        if told[-1]["time"] - told[0]["time"] >= LONG_LIFE:
            seconds = settled[-1]["time"] - settled[0]["time"]
            grown = settled[-1]["rss"] - settled[0]["rss"]
            growths.append(60 * grown / 2**20 / max(seconds, 1.0))
    return growths


def watch(soak: Soak, seconds: float, note: Callable[..., None]) -> list[str]:
    """Act every 50 steps until the time is over; what went wrong."""
    begin = last_step = noted = time.time()
    reached = acted = 0
    try:
        with tqdm(total=round(seconds), unit="s", disable=None) as bar:
            while time.time() < begin + seconds:
                time.sleep(1.0)
                steps = soak.steps()
                if steps > reached:
                    reached, last_step = steps, time.time()
                bar.update(min(round(time.time() - begin), bar.total) - bar.n)
                bar.set_postfix_str(f"{reached} steps, {soak.counts}")
                if soak.process.poll() is not None:
                    status = soak.process.returncode
                    return [f"the training ended with status {status}; see output.txt"]
                if time.time() > last_step + LONGEST_PAUSE:
                    soak.show_stacks()
                    return [f"no step for {LONGEST_PAUSE:.0f} s; see output.txt"]
                if steps >= acted + STEPS:
                    acted, event = steps, soak.act()
                    note(event=event, step=steps, seconds=time.time() - noted)
                    noted = time.time()
        status = soak.stop()
    finally:
        note(event="stop", seconds=time.time() - noted)
    faults = faults_of(soak.entries())
    return faults + ([f"the launcher ended with status {status}"] if status else [])


if __name__ == "__main__":
    sys.exit(main())
