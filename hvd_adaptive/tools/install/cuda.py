"""Find CUDA and NCCL, and decide whether Horovod can be built with them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import MISSING, InstallError
from .torch_facts import Torch

USUAL_HOME, RUNTIME_HEADER = Path("/usr/local/cuda"), "cuda_runtime.h"


@dataclass(frozen=True)
class Nccl:
    """Locate NCCL's header folder and shared library."""

    include: Path
    library: Path


@dataclass(frozen=True)
class Gpu:
    """Describe how the build treats GPUs, and why.

    With `nccl`, gradients on GPUs travel by NCCL. With only `home`, Horovod's own CMake compiles
    its staging of GPU tensors through host memory. With neither, the build has no GPU support.
    """

    reason: str
    home: Path | None = None
    nvcc_version: str = ""
    nccl: Nccl | None = None


def find_gpu(wish: str, torch: Torch, environ: Mapping[str, str], site: Path) -> Gpu:
    """Decide on GPU support.

    Args:
        wish: "auto", "yes" (anything missing is an error) or "no" (no NCCL).
        torch: the torch to build against.
        environ: holds HOROVOD_CUDA_HOME, CUDA_HOME, HOROVOD_NCCL_HOME, NCCL_HOME and PATH.
        site: the site-packages folder, in which PyPI's NCCL wheels put header and library.
    """
    gpu = _look(wish, torch, environ, site)
    if wish == "yes" and gpu.nccl is None:
        raise InstallError(
            f"--cuda yes: {gpu.reason}",
            exit_code=MISSING,
            hints=[
                "a GPU build needs a torch built with CUDA, nvcc of the same major version "
                "(HOROVOD_CUDA_HOME names its folder) and NCCL's header and library "
                "(HOROVOD_NCCL_HOME, or the nvidia-nccl package that torch's CUDA wheels bring)"
            ],
        )
    return gpu


def _look(wish: str, torch: Torch, environ: Mapping[str, str], site: Path) -> Gpu:
    if torch.cuda is None:
        return Gpu(f"CPU build: torch {torch.version} has no CUDA")
    home = _cuda_home(environ)
    if home is None:
        return Gpu("CPU build: torch has CUDA, but there is no toolkit: no GPU tensors")
    version = _nvcc_version(home)
    if version and version.split(".")[0] != torch.cuda.split(".")[0]:
        return Gpu(
            f"CPU operations: nvcc is {version}, torch's CUDA is {torch.cuda}", home, version
        )
    if wish == "no":
        return Gpu("CPU operations, as asked: GPU tensors go through host memory", home, version)
    nccl = _find_nccl(_nccl_homes(environ, home, site))
    if nccl is None:
        return Gpu("CPU operations: no NCCL; GPU tensors go through host memory", home, version)
    return Gpu(f"GPU build: CUDA {version or torch.cuda} with NCCL", home, version, nccl)


def _cuda_home(environ: Mapping[str, str]) -> Path | None:
    """Return the toolkit's folder: of a variable, of nvcc on PATH, or the usual one."""
    named = [environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    if home := next((Path(home) for home in named if home and _nvcc(Path(home)).is_file()), None):
        return home
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    found = [Path(on_path).resolve().parent.parent] if on_path else []
    return next((home for home in (*found, USUAL_HOME) if _is_whole(home)), None)


def _nvcc(home: Path) -> Path:
    return home / "bin" / "nvcc"


def _is_whole(home: Path) -> bool:
    """Return whether nvcc and the runtime's header are there: nvcc on PATH may be a script that
    calls another."""
    headers = [home / "include" / RUNTIME_HEADER, *home.glob(f"targets/*/include/{RUNTIME_HEADER}")]
    return _nvcc(home).is_file() and any(header.is_file() for header in headers)


def _nvcc_version(home: Path) -> str:
    try:
        done = subprocess.run(
            [str(_nvcc(home)), "--version"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if match else ""


def _nccl_homes(environ: Mapping[str, str], cuda: Path, site: Path) -> Iterable[Path]:
    for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT"):
        if environ.get(name):
            yield Path(environ[name])
    # The same NCCL that torch itself loads comes before any other.
    yield site / "nvidia" / "nccl"
    yield from (cuda, Path("/usr/local/nccl"), Path("/usr"))


def _find_nccl(homes: Iterable[Path]) -> Nccl | None:
    for home in homes:
        include = home / "include"
        if not (include / "nccl.h").is_file():
            continue
        for folder in (home / "lib", home / "lib64", *sorted(home.glob("lib/*-linux-gnu"))):
            libraries = sorted(folder.glob("libnccl.so*"))
            if libraries:
                return Nccl(include, libraries[0])
    return None
