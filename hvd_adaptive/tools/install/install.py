"""Install Horovod: look, reuse what is good, else build; install; verify."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from rich.console import Console

from . import preflight
from .build import build_folder, find_wheel, keep_wheel, run_build, wheel_root
from .diagnose import BUILD_FAILED, MISSING, NOT_WORKING, InstallError, diagnose, tail
from .environment import Facts, Options, gather, require_packages, search_path
from .recipe import Plan, build_key, make_plan, relative_rpaths, wrapper_script

_GIB_PER_JOB = 2
_PROBE = """
import json
import horovod, horovod.torch as hvd
from importlib.resources import files
built = json.loads(files("horovod").joinpath("metadata.json").read_text())
print(json.dumps({
    "version": horovod.__version__,
    "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built()),
    "torch": built.get("pytorch"),
}))
"""


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
    require_packages()
    status, wheel = _reuse(job) or ("built", None)
    if status == "built":
        wheel = build(job)
        pip_install(wheel)
        if wrong := problems(job.options, job.facts):
            raise InstallError(
                f"Horovod was built and installed, but {'; '.join(wrong)}",
                exit_code=NOT_WORKING,
                hints=diagnose("\n".join(wrong)),
                log=wheel.with_name("build.log"),
            )
    return Outcome(status, wheel, time.monotonic() - start)


def _reuse(job: Job) -> tuple[str, Path | None] | None:
    """Return how an earlier build is used, and its wheel; None if there must be a new one."""
    wheel = find_wheel(job.root, job.key)
    if job.options.rebuild:
        return None
    version, key = installed()
    same = version == job.options.version and key in (None, job.key)
    if same and not problems(job.options, job.facts):
        return "already installed", wheel
    if wheel is None:
        return None
    job.console.print(f"Installing the wheel kept from an earlier build: {wheel}", markup=False)
    pip_install(wheel)
    wrong = problems(job.options, job.facts)
    if not wrong:
        return "installed from cache", wheel
    told = f"It does not work here ({'; '.join(wrong)}): building anew"
    job.console.print(told, markup=False)
    return None


def build(job: Job) -> Path:
    """Build the wheel, keep it, and return its new path."""
    plan_of = prepare(job)
    with build_folder(job.root) as folder:
        plan, script = plan_of(folder)
        (folder / "cxx").write_text(script, encoding="utf-8")
        (folder / "cxx").chmod(0o755)
        link_nccl(job.facts, folder)
        log = folder / "build.log"
        told = f"Building Horovod {job.options.version} (a few minutes); log: {log}"
        job.console.print(told, markup=False)
        status = run_build(plan, job.environ, log, job.console)
        wheel = next(iter(folder.glob("horovod-*.whl")), None)
        if status != 0 or wheel is None:
            text = log.read_text(encoding="utf-8", errors="replace")
            raise InstallError(
                f"building Horovod failed (exit status {status})",
                exit_code=BUILD_FAILED,
                hints=diagnose(text),
                log=log,
                output=tail(text),
            )
        return keep_wheel(job.root, job.key, wheel, log)


def prepare(job: Job) -> Callable[[Path], tuple[Plan, str]]:
    """Check what a build needs; return a function from its folder to the plan and the wrapper."""
    standard = job.facts.torch.standard
    cmake = shutil.which("cmake", path=search_path(job.facts.scripts, job.environ))
    missing = preflight.problems(job.environ, standard)
    if job.facts.mpi:
        missing += filter(None, [preflight.folder_problem(job.facts.mpi.compiler)])
    if not cmake:
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
    gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, int(min(len(os.sched_getaffinity(0)), gib / _GIB_PER_JOB)))


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
        output = done.stderr or done.stdout
        raise InstallError(f"pip could not install {wheel}", exit_code=BUILD_FAILED, output=output)


def installed() -> tuple[str | None, str | None]:
    """Return the version and the key of the installed Horovod; None for what is not known."""
    try:
        found = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return None, None
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    # pip notes the file it installed from; kept wheels lie in a folder named by their key.
    folder = Path(unquote(urlparse(origin.get("url", "")).path)).parent.name
    return found.version, folder if re.fullmatch(r"[0-9a-f]{16}", folder) else None


def problems(options: Options, facts: Facts) -> list[str]:
    """Return how the installed Horovod differs from the request; empty if it is good."""
    seen, trouble = probe()
    if seen is None:
        return [trouble]
    wanted = {
        "version": options.version,
        "torch": facts.torch.version,
        "mpi": facts.mpi is not None,
        "gloo": options.gloo,
        "nccl": facts.gpu.nccl is not None,
    }
    pairs = ((name, seen.get(name), value) for name, value in wanted.items())
    return [f"{name} is {found}, not {value}" for name, found, value in pairs if found != value]


def probe() -> tuple[dict[str, object] | None, str]:
    """Return what the installed Horovod reports: version, mpi, gloo, nccl, torch (the version that
    it was built for); or None and why it cannot be imported.
    """
    # The probe runs in a folder of its own, so that no ./horovod hides the installed one.
    with tempfile.TemporaryDirectory(prefix="hvd_adaptive-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _PROBE],
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=300,
            )
        except subprocess.TimeoutExpired:
            return None, "importing horovod.torch did not end within 300 s"
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-3:] or [f"exit status {done.returncode}"]
        return None, "import horovod.torch fails: " + " | ".join(words)
    return json.loads(done.stdout.splitlines()[-1]), ""
