"""Plant faults in the package, one at a time, and count how many the unit tests find.

    nice -n 15 python tests/mutation/mutate.py --mutants 130 --seed 1 --ranks

A first run of the tests notes which of them run each line. Then a sample of mutants is drawn
(mutants.py), and each is tried by tests that run its line, the quickest first, until one fails;
with ``--ranks`` what survives them is tried by the checks of two ranks over torch.distributed.
Every run is a fork of a process that has imported torch, Numba and pytest, and the package not yet.
No file of the package is changed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import random
import runpy
import signal
import sys
import tempfile
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
TESTS = (
    *(f"tests/unit/{name}" for name in ("codec", "exchange", "hooks", "monitor", "run")),
    "tests/unit/coding/test_coding.py",
    "tests/unit/simulate/test_simulate_ranks.py",
    *(f"tests/unit/test_{name}.py" for name in ("changes", "malformed_states", "range", "streams")),
    "tests/golden",
)
QUIET = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--tb=line"]
RANKS = ROOT / "tests/parallel/ddp"
TIMED_OUT = -1
VERDICTS = ("found", "timed out", "found by ranks", "survived", "no test")


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


class Loader(importlib.machinery.SourceFileLoader):
    """Compile one module of the package as its mutant; bytecode is neither read nor written."""

    def __init__(self, file: str, index: int) -> None:
        module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        super().__init__(module, str(ROOT / file))
        self.index = index
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path, target=None):
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self.path, loader=self)
        return None

    def get_code(self, fullname):
        source = self.get_data(self.path).decode()
        return compile(mutated(source, self.index), self.path, "exec")


def forked(work: Callable[[], int], output: Path, seconds: float) -> int:
    """Return the exit status of `work` in a process of its own, or TIMED_OUT."""

    def child() -> None:
        os.setsid()
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.exit(int(work()))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        process.join(seconds)
        return TIMED_OUT if process.exitcode is None else process.exitcode
    finally:
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()


def note_lines(file: Path, tests: Sequence[str], folders: Sequence[str]) -> None:
    """Run the tests as they are; write the lines that each of them runs."""

    def work() -> int:
        plugin = Lines(folders)
        status = pytest.main([arg for arg in QUIET if arg != "-x"] + list(tests), [plugin])
        file.write_text(json.dumps(plugin.found()))
        return status

    status = forked(work, file.with_suffix(".log"), 24 * 3600)
    if not file.exists():
        sys.exit(f"the tests did not run: status {status}, see {file.with_suffix('.log')}")


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
        Loader(file, index)
        return pytest.main([*QUIET, "-o", f"timeout={20 + 4 * seconds:.0f}", *names])

    status = forked(work, output, 30 + 5 * seconds)
    return {0: "survived", 5: "no test", TIMED_OUT: "timed out"}.get(status, "found")


def found_by_ranks(file: str, index: int, output: Path) -> bool:
    """Return whether a check of two forked ranks fails, or hangs."""

    def work() -> int:
        Loader(file, index)
        sys.argv = ["fork_ranks.py", "2", *map(str, sorted(RANKS.glob("check_*.py")))]
        try:
            runpy.run_path(str(RANKS / "fork_ranks.py"), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return forked(work, output, 300) != 0


def tried(drawn: Sequence[tuple[str, int]], noted: dict, own: argparse.Namespace, log: Path):
    """Yield each mutant's folder and verdict; print those that tests of one process do not find."""
    for name, index in drawn:
        mutant = mutants(ast.parse((ROOT / name).read_text(encoding="utf-8")))[index]
        told = verdict(name, index, mutant.line, noted, log, own.seconds)
        if own.ranks and told in ("survived", "no test"):
            told = "found by ranks" if found_by_ranks(name, index, log) else told
        if told != "found":
            change = f"{mutant.before!r} -> {mutant.after!r}"
            print(f"{told}: {name}:{mutant.line} (:{index}) {change}", flush=True)
        yield name.split("/")[1], told


def parsed() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and what is for pytest's first run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=130, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests for each mutant")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="of the package")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="that may find a mutant")
    parser.add_argument("--noted", type=Path, help="keep the tests of each line in this file")
    parser.add_argument("--ranks", action="store_true", help="try survivors on two ranks, too")
    parser.add_argument("--only", nargs="+", metavar="FILE:INDEX", help="these mutants")
    return parser.parse_known_args()


def main() -> int:
    own, more = parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = (own.noted or Path(folder, "noted.json")).resolve()
        os.chdir(ROOT)
        if not file.exists():
            note_lines(file, [*own.tests, *more], own.folders)
        places = [name.rpartition(":") for name in own.only or ()]
        drawn = [(name, int(index)) for name, _, index in places]
        drawn = drawn or sample(own.folders, own.mutants, own.seed)
        noted = json.loads(file.read_text())
        for name, told in tried(drawn, noted, own, Path(folder, "log")):
            counts.setdefault(name, Counter())[told] += 1
    print(f"| folder | mutants | {' | '.join(VERDICTS)} |\n|{' --- |' * (2 + len(VERDICTS))}")
    for name, of_folder in counts.items():
        cells = [of_folder.total(), *(of_folder[told] for told in VERDICTS)]
        print(f"| {name}/ | {' | '.join(map(str, cells))} |")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
