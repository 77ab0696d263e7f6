"""Install Horovod: look, reuse what is good, else build; install; verify."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from . import preflight
from .build import run_build
from .cache import build_folder, find_wheel, keep_wheel, wheel_root
from .diagnose import diagnose, tail
from .errors import BUILD_FAILED, MISSING, NOT_WORKING, InstallError
from .facts import Facts, Options, gather, require_modules, search_path
from .plan import Plan, build_key, key_parts, make_plan, relative_rpaths
from .verify import find_installed, problems
from .wrapper import wrapper_script, write_wrapper

_GIB_PER_JOB = 2


@dataclass
class Job:
    """Describe one call of the command: options, facts, and places to show and keep things."""

    options: Options
    environ: Mapping[str, str]
    console: Console
    facts: Facts = field(init=False)
    key: str = field(init=False)
    root: Path = field(init=False)

    def __post_init__(self) -> None:
        self.facts = gather(self.options, self.environ)
        self.key = build_key(self.options, self.facts, self.environ)
        self.root = wheel_root(self.options.wheel_dir, self.environ)


@dataclass(frozen=True)
class Outcome:
    """Describe the result: `status` is "already installed", "installed from cache" or "built"."""

    status: str
    key: str
    wheel: Path | None
    seconds: float


def install(job: Job) -> Outcome:
    """Make sure that the requested Horovod is installed and imports.

    The function uses the first of these that is possible:

    1. The installed Horovod, if it is the same and works.
    2. The wheel kept from an earlier build with the same key, if it works.
    3. A new build.
    """
    start = time.monotonic()
    require_modules()

    def outcome(status: str, wheel: Path | None) -> Outcome:
        return Outcome(status, job.key, wheel, time.monotonic() - start)

    wheel = find_wheel(job.root, job.key)
    if not job.options.rebuild:
        if installed_is_good(job):
            return outcome("already installed", wheel)
        if wheel is not None:
            job.console.print(f"Installing the wheel kept from an earlier build: {wheel}")
            pip_install(wheel)
            wrong = problems(job.options, job.facts)
            if not wrong:
                return outcome("installed from cache", wheel)
            job.console.print(f"It does not work here ({'; '.join(wrong)}): building anew")
    wheel = build(job)
    pip_install(wheel)
    wrong = problems(job.options, job.facts)
    if wrong:
        raise InstallError(
            f"Horovod was built and installed, but {'; '.join(wrong)}",
            exit_code=NOT_WORKING,
            hints=diagnose("\n".join(wrong)),
            log=wheel.with_name("build.log"),
        )
    return outcome("built", wheel)


def installed_is_good(job: Job) -> bool:
    """Return whether the installed Horovod is as requested, by key or (by hand) by its features."""
    found = find_installed()
    if found is None or found.version != job.options.version:
        return False
    return found.key in (None, job.key) and not problems(job.options, job.facts)


def build(job: Job) -> Path:
    """Build the wheel, keep it, and return its new path."""
    plan_of = prepare(job)
    with build_folder(job.root) as folder:
        plan, script = plan_of(folder)
        write_wrapper(folder / "cxx", script)
        link_nccl(job.facts, folder)
        log = folder / "build.log"
        job.console.print(f"Building Horovod {job.options.version} (a few minutes); log: {log}")
        status = run_build(plan, job.environ, log, job.console)
        wheel = next(iter(folder.glob("horovod-*.whl")), None)
        if status != 0 or wheel is None:
            text = log.read_text(encoding="utf-8", errors="replace")
            raise InstallError(
                f"building Horovod failed (exit status {status})",
                exit_code=BUILD_FAILED,
                hints=diagnose(text),
                log=log,
                tail=tail(text),
            )
        parts = key_parts(job.options, job.facts, job.environ)
        return keep_wheel(job.root, job.key, wheel, log, parts)


def prepare(job: Job) -> Callable[[Path], tuple[Plan, str]]:
    """Check what a build needs; return a function from its folder to the plan and the wrapper."""
    standard = job.facts.torch.standard
    checks = (
        preflight.compiler_problem(job.environ, standard),
        preflight.headers_problem(),
        preflight.make_problem(job.environ),
        preflight.folder_problem(job.facts.mpi.compiler) if job.facts.mpi else None,
    )
    missing = [problem for problem in checks if problem]
    cmake = shutil.which("cmake", path=search_path(job.facts.scripts, job.environ))
    if cmake is None:
        missing.append(f"there is no cmake: {sys.executable} -m pip install cmake")
    compiler = preflight.find_compiler(job.environ)
    if missing or compiler is None or cmake is None:
        raise InstallError("Horovod cannot be built yet", exit_code=MISSING, hints=missing)
    jobs = job.options.jobs or default_jobs()

    def plan_of(folder: Path) -> tuple[Plan, str]:
        plan = make_plan(job.options, job.facts, job.environ, folder, cmake, jobs)
        return plan, wrapper_script(compiler, standard, relative_rpaths(job.facts))

    return plan_of


def default_jobs() -> int:
    """Return as many compilers as there are cores, and memory for them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (OSError, ValueError):
        gib = float("inf")
    return max(1, int(min(cores or 1, gib / _GIB_PER_JOB)))


def link_nccl(facts: Facts, folder: Path) -> None:
    """Give the linker the name libnccl.so, which PyPI's NCCL lacks."""
    if facts.gpu.nccl is not None:
        (folder / "nccl").mkdir()
        (folder / "nccl" / "libnccl.so").symlink_to(facts.gpu.nccl.library)


def pip_install(wheel: Path) -> None:
    """Install `wheel` and nothing else."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--force-reinstall", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise InstallError(
            f"pip could not install {wheel}",
            exit_code=BUILD_FAILED,
            tail=(done.stderr or done.stdout).strip().splitlines()[-10:],
        )
