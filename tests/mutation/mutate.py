"""Plant faults in the package, one at a time, and count how many the unit tests find.

    nice -n 15 python tests/mutation/mutate.py --mutants 130 --seed 1

A first run of the tests notes which of them run each line. Then a sample of mutants is drawn
(mutants.py), and each is tried by tests that run its line, those of its folder first and the
quickest of each first, until one fails; what survives them in exchange/ and run/ is tried by the
checks of two ranks over torch.distributed.
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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import hypothesis  # noqa: F401
import numba  # noqa: F401
import pytest
import torch  # noqa: F401
from mutants import mutants, mutated
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
OF_RANKS = ("exchange", "run")
FOLDERS = ("codec", *OF_RANKS)
TESTS = (
    *(f"tests/unit/{name}" for name in ("adapt", "codec", "exchange", "hooks", "monitor", "run")),
    "tests/unit/schemes",
    "tests/unit/coding/test_coding.py",
    "tests/unit/simulate/test_simulate_ranks.py",
    *(
        f"tests/unit/test_{name}.py"
        for name in ("changes", "hostile_gradients", "malformed_states", "streams")
    ),
    "tests/oracle",
    "tests/golden",
)
QUIET = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--tb=line"]
RANKS = ROOT / "tests/parallel/ddp"
TIMED_OUT = -1
MOST_TESTS, SECONDS = 200, 100.0  # of tests for each mutant
RANKS_SECONDS = 900.0  # of the checks of two ranks, each of which has a limit of its own
VERDICTS = ("found", "timed out", "found by ranks", "survived", "no test")


class Lines:
    """A plugin of pytest that notes the lines that each test runs, and its seconds."""

    def __init__(self) -> None:
        import coverage

        include = [f"{ROOT}/hvd_adaptive/{name}/*" for name in FOLDERS]
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=include)
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

    def found(self) -> dict[str, dict[str, list[str]]]:
        """Return for each file the passed tests of each line, the quickest first. Imports alone run
        some lines, as constants and classes: those have all tests that use the file."""
        self.coverage.stop()
        data = self.coverage.get_data()
        passed = sorted(self.seconds.keys() - self.failed, key=self.seconds.__getitem__)
        found = {}
        for file in data.measured_files():
            of_lines = data.contexts_by_lineno(file)
            of_file = {name for names in of_lines.values() for name in names}
            found[str(Path(file).relative_to(ROOT))] = {
                str(line): [name for name in passed if name in (set(names) - {""} or of_file)]
                for line, names in of_lines.items()
            }
        return found


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


def noted_lines(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Run the tests as they are; return the tests of each line of each file."""
    file = folder / "noted.json"

    def work() -> int:
        plugin = Lines()
        status = pytest.main([arg for arg in QUIET if arg != "-x"] + list(TESTS), [plugin])
        file.write_text(json.dumps(plugin.found()))
        return status

    log = folder / "noted.log"
    if forked(work, log, 24 * 3600) == TIMED_OUT or not file.exists():
        sys.exit(f"the tests did not run:\n{log.read_text()[-3000:]}")
    return json.loads(file.read_text())


def sample(count: int, seed: int) -> list[tuple[str, int]]:
    """Draw mutants without replacement, every one as likely: (file, index)."""
    everyone = []
    for folder in FOLDERS:
        for path in sorted((ROOT / "hvd_adaptive" / folder).glob("*.py")):
            many = len(mutants(ast.parse(path.read_text(encoding="utf-8"))))
            everyone += [(str(path.relative_to(ROOT)), index) for index in range(many)]
    drawn = random.Random(seed).sample(everyone, min(count, len(everyone)))
    print(f"{len(drawn)} of {len(everyone)} mutants", flush=True)
    return sorted(drawn)


def verdict(file: str, index: int, names: list[str], output: Path) -> str:
    """Return what tests of one process find: "found", "timed out", "survived" or "no test"."""
    if not names:
        return "no test"
    own = f"tests/unit/{Path(file).parent.name}/"
    names = sorted(names, key=lambda name: not name.startswith(own))

    def work() -> int:
        Loader(file, index)
        return pytest.main([*QUIET, "-o", f"timeout={SECONDS:.0f}", *names[:MOST_TESTS]])

    status = forked(work, output, 2 * SECONDS)
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

    return forked(work, output, RANKS_SECONDS) != 0


def tried(file: str, index: int, lines: dict[str, list[str]], folder: Path) -> tuple[str, str]:
    mutant = mutants(ast.parse(Path(file).read_text(encoding="utf-8")))[index]
    output = folder / f"{os.getpid()}.log"
    told = verdict(file, index, lines.get(str(mutant.line), []), output)
    may_be_found = told in ("survived", "no test") and file.split("/")[1] in OF_RANKS
    if may_be_found and found_by_ranks(file, index, output):
        told = "found by ranks"
    return told, f"{file}:{mutant.line} {mutant.before!r} -> {mutant.after!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=130, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folders",
        nargs="+",
        choices=FOLDERS,
        default=FOLDERS,
        help="try the faults of these alone",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    own = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    counts: dict[str, Counter[str]] = {name: Counter() for name in FOLDERS}
    os.chdir(ROOT)
    processes = ProcessPoolExecutor(own.jobs, multiprocessing.get_context("fork"))
    with tempfile.TemporaryDirectory() as name:
        lines = noted_lines(Path(name))
        everyone = sample(own.mutants, own.seed)
        drawn = [(file, index) for file, index in everyone if file.split("/")[1] in own.folders]
        trials = {
            processes.submit(tried, file, index, lines.get(file, {}), Path(name)): file
            for file, index in drawn
        }
        try:
            for trial in tqdm(as_completed(trials), total=len(trials), unit="mutant", disable=None):
                told, change = trial.result()
                counts[trials[trial].split("/")[1]][told] += 1
                if told != "found":
                    tqdm.write(f"{told}: {change}")
                    sys.stdout.flush()
        finally:
            processes.shutdown(cancel_futures=True)
    print(f"| folder | mutants | {' | '.join(VERDICTS)} |\n|{' --- |' * (2 + len(VERDICTS))}")
    for name, of_folder in counts.items():
        cells = [of_folder.total(), *(of_folder[told] for told in VERDICTS)]
        print(f"| {name}/ | {' | '.join(map(str, cells))} |")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
