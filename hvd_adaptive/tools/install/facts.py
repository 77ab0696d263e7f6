"""Collect the options and the facts of the environment that decide how Horovod is built."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .cuda import Gpu, find_gpu
from .errors import MISSING, InstallError
from .mpi import Mpi, find_mpi
from .torch_facts import Torch, find_torch

VERSION = "0.28.1"

# Horovod's own requirements, which --no-build-isolation leaves to this package: module -> package.
_MODULES = {
    "setuptools": "setuptools",
    "wheel": "wheel",
    "packaging": "packaging",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "cffi": "cffi",
}
# Horovod's CMake requests only these instruction sets, each if the building CPU has it.
_CPU_FEATURES = {"avx", "f16c", "fma"}


@dataclass(frozen=True)
class Options:
    """Hold the user's options."""

    version: str = VERSION
    mpi: bool = True
    gloo: bool = True
    cuda: str = "auto"
    jobs: int | None = None
    rebuild: bool = False
    wheel_dir: Path | None = None


@dataclass(frozen=True)
class Facts:
    """Hold the facts of this environment."""

    torch: Torch
    mpi: Mpi | None
    gpu: Gpu
    prefix: Path
    site: Path
    scripts: Path
    cpu: tuple[str, ...]


def gather(options: Options, environ: Mapping[str, str]) -> Facts:
    """Look at this Python's environment."""
    paths = sysconfig.get_paths()
    site, scripts = Path(paths["platlib"]), Path(paths["scripts"])
    torch = find_torch()
    return Facts(
        torch=torch,
        mpi=find_mpi(search_path(scripts, environ)) if options.mpi else None,
        gpu=find_gpu(options.cuda, torch, environ, site),
        prefix=Path(sys.prefix),
        site=site,
        scripts=scripts,
        cpu=cpu_features(Path("/proc/cpuinfo")),
    )


def search_path(scripts: Path, environ: Mapping[str, str]) -> str:
    """Return PATH with the environment's own programs first, whether or not it is activated."""
    return os.pathsep.join([str(scripts), environ.get("PATH", os.defpath)])


def cpu_features(cpuinfo: Path) -> tuple[str, ...]:
    """Return which of the instruction sets that Horovod may use this CPU has."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return ()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return tuple(sorted(_CPU_FEATURES & set(flags.split())))


def require_modules() -> None:
    """Raise InstallError if a Python package is missing that Horovod builds or runs with."""
    if importlib.util.find_spec("pip") is None:
        raise InstallError(
            "this environment has no pip",
            exit_code=MISSING,
            hints=[f"{sys.executable} -m ensurepip, or with uv: uv pip install pip"],
        )
    missing = [package for name, package in _MODULES.items() if not importlib.util.find_spec(name)]
    if missing:
        raise InstallError(
            f"Horovod needs {', '.join(missing)}, not installed here",
            exit_code=MISSING,
            hints=[f"{sys.executable} -m pip install {' '.join(missing)}"],
        )
