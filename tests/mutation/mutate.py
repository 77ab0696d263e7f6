"""Plant faults in the package, one at a time, and count how many the unit tests find.

    nice -n 15 python tests/mutation/mutate.py --mutants 150 --seed 1

A first run of the tests notes which of them run each line. Then a sample of mutants is drawn
(mutants.py), and each is tried by tests that run its line, the quickest first, until one fails.
Every run is a fork of a process that has imported torch, Numba and pytest, and the package not yet.
No file of the package is changed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis  # noqa: F401
import numba  # noqa: F401
import pytest
import torch  # noqa: F401
from mutants import mutants, mutated

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("codec", "exchange", "run")
TESTS = ("tests/unit/exchange", "tests/unit/run", "tests/unit/codec", "tests/unit/hooks")
QUIET = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--tb=line"]
TIMED_OUT = -1


class Lines:
    """A plugin of pytest that notes the lines that each test runs, and its seconds."""

    def __init__(self, folders: Sequence[str]) -> None:
        import coverage

        self.coverage = coverage.Coverage(
            data_file=None,
            config_file=False,
            include=[f"{ROOT}/hvd_adaptive/{name}/*" for name in folders],
        )
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_sessionstart(self) -> None:
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.coverage.switch_context(item.nodeid)
        start = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - start
        return result

    def pytest_runtest_logreport(self, report) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def found(self) -> dict:
        """Return the tests' seconds, and for each file the tests of each line."""
        self.coverage.stop()
        data = self.coverage.get_data()
        passed = self.seconds.keys() - self.failed
        lines = {
            str(Path(file).relative_to(ROOT)): {
                str(line): [name for name in names if name in passed]
                for line, names in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        return {"seconds": self.seconds, "lines": lines}


class Finder(importlib.abc.MetaPathFinder):
    """Load one module of the package as its mutant."""

    def __init__(self, file: str, index: int) -> None:
        self.module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self.index = index

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(name, spec.origin, self.index)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    """Compile a module's mutant; bytecode is neither read nor written."""

    def __init__(self, name: str, path: str, index: int) -> None:
        super().__init__(name, path)
        self.index = index

    def get_code(self, fullname):
        source = self.get_data(self.path).decode()
        return compile(mutated(source, self.index), self.path, "exec")


def forked(work: Callable[[], int], output: Path, seconds: float) -> int:
    """Return the exit status of `work` in a process of its own, or TIMED_OUT."""
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 3
        try:
            status = int(work())
        finally:
            sys.stdout.flush()
            os._exit(status)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
    except BaseException:
        os.killpg(child, signal.SIGKILL)
        raise
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMED_OUT


def note_lines(file: Path, tests: Sequence[str], folders: Sequence[str]) -> dict:
    """Run the tests as they are; write and return the lines that each of them runs."""

    def work() -> int:
        plugin = Lines(folders)
        status = pytest.main([arg for arg in QUIET if arg != "-x"] + list(tests), [plugin])
        file.write_text(json.dumps(plugin.found()))
        return status

    status = forked(work, file.with_suffix(".log"), 24 * 3600)
    if not file.exists():
        sys.exit(f"the tests did not run: status {status}, see {file.with_suffix('.log')}")
    return json.loads(file.read_text())


def sample(folders: Sequence[str], count: int, seed: int) -> list[tuple[str, int]]:
    """Draw mutants without replacement, every one as likely: (file, index)."""
    everyone = []
    for folder in folders:
        for path in sorted((ROOT / "hvd_adaptive" / folder).glob("*.py")):
            many = len(mutants(ast.parse(path.read_text(encoding="utf-8"))))
            everyone += [(str(path.relative_to(ROOT)), index) for index in range(many)]
    drawn = random.Random(seed).sample(everyone, min(count, len(everyone)))
    print(f"{len(drawn)} of {len(everyone)} mutants", flush=True)
    return sorted(drawn)


def tests_of(file: str, line: int, noted: dict, seconds: float) -> list[str]:
    """Return tests that run a line, the quickest first, as many as take so many seconds."""
    lines = noted["lines"].get(file, {})
    names = set(lines.get(str(line), ()))
    if not names:  # run by imports alone, as constants and classes are: all that use the file
        names = {name for of_line in lines.values() for name in of_line}
    chosen, total = [], 0.0
    for name in sorted(names, key=lambda name: (noted["seconds"][name], name)):
        total += noted["seconds"][name]
        if total > seconds and chosen:
            break
        chosen.append(name)
    return chosen


def verdict(file: str, index: int, line: int, noted: dict, output: Path, seconds: float) -> str:
    """Return "found", "timed out", "survived" or "no test"."""
    names = tests_of(file, line, noted, seconds)
    if not names:
        return "no test"

    def work() -> int:
        sys.meta_path.insert(0, Finder(file, index))
        return pytest.main([*QUIET, "-o", f"timeout={60 + 3 * seconds:.0f}", *names])

    status = forked(work, output, 120 + 4 * seconds)
    return {0: "survived", 5: "no test", TIMED_OUT: "timed out"}.get(status, "found")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=150, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests for each mutant")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="of the package")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="that may find a mutant")
    parser.add_argument("--noted", type=Path, default=Path("mutation-lines.json"))
    parser.add_argument("--only", nargs="+", metavar="FILE:INDEX", help="these mutants")
    arguments, more = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.chdir(ROOT)
    file = arguments.noted
    noted = json.loads(file.read_text()) if file.exists() else None
    noted = noted or note_lines(file.resolve(), [*arguments.tests, *more], arguments.folders)
    drawn = sample(arguments.folders, arguments.mutants, arguments.seed)
    if arguments.only:
        drawn = [(name.rpartition(":")[0], int(name.rpartition(":")[2])) for name in arguments.only]
    counts: dict[str, Counter[str]] = {}
    for name, index in drawn:
        mutant = mutants(ast.parse((ROOT / name).read_text(encoding="utf-8")))[index]
        output = file.with_suffix(".log").resolve()
        told = verdict(name, index, mutant.line, noted, output, arguments.seconds)
        counts.setdefault(name.split("/")[1], Counter())[told] += 1
        if told != "found":
            change = f"{mutant.before!r} -> {mutant.after!r}" if len(mutant.before) < 200 else "..."
            print(f"{told}: {name}:{mutant.line} (:{index}) {change}", flush=True)
    print("| folder | mutants | found | timed out | survived | no test |\n|" + " --- |" * 6)
    for folder, of_folder in counts.items():
        kinds = ("found", "timed out", "survived", "no test")
        print(f"| {folder}/ | {of_folder.total()} |", *(f"{of_folder[kind]} |" for kind in kinds))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
