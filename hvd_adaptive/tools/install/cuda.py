"""Find CUDA and NCCL, and decide whether Horovod can be built with them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .diagnose import MISSING, InstallError

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


def find_gpu(wish: str, torch_cuda: str | None, environ: Mapping[str, str], site: Path) -> Gpu:
    """Decide on GPU support.

    Args:
        wish: "auto", "yes" (anything missing is an error) or "no" (no NCCL).
        torch_cuda: the CUDA version of the torch to build against, if any.
        environ: holds HOROVOD_CUDA_HOME, CUDA_HOME, HOROVOD_NCCL_HOME, NCCL_HOME and PATH.
        site: the site-packages folder, in which PyPI's NCCL wheels put header and library.
    """
    gpu = _look(wish, torch_cuda, environ, site)
    if wish == "yes" and gpu.nccl is None:
        hint = (
            "a GPU build needs a torch built with CUDA, nvcc of the same major version "
            "(HOROVOD_CUDA_HOME names its folder) and NCCL's header and library "
            "(HOROVOD_NCCL_HOME, or the nvidia-nccl package that torch's CUDA wheels bring)"
        )
        raise InstallError(f"--cuda yes: {gpu.reason}", exit_code=MISSING, hints=[hint])
    return gpu


def _look(wish: str, torch_cuda: str | None, environ: Mapping[str, str], site: Path) -> Gpu:
    if torch_cuda is None:
        return Gpu("CPU build: torch has no CUDA")
    home = _cuda_home(environ)
    if home is None:
        return Gpu("CPU build: torch has CUDA, but there is no toolkit: no GPU tensors")
    version = _nvcc_version(home)
    if version and version.split(".")[0] != torch_cuda.split(".")[0]:
        reason = f"CPU operations: nvcc is {version}, torch's CUDA is {torch_cuda}"
        return Gpu(reason, home, version)
    if wish == "no":
        return Gpu("CPU operations, as asked: GPU tensors go through host memory", home, version)
    nccl = _find_nccl(environ, home, site)
    if nccl is None:
        return Gpu("CPU operations: no NCCL; GPU tensors go through host memory", home, version)
    return Gpu(f"GPU build: CUDA {version or torch_cuda} with NCCL", home, version, nccl)


def _cuda_home(environ: Mapping[str, str]) -> Path | None:
    """Return the toolkit's folder: of a variable, of nvcc on PATH, or the usual one.

    nvcc on PATH may be a script that calls another: then the runtime's header is not beside it.
    """
    named = [environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME")]
    for home in (Path(name) for name in named if name):
        if (home / "bin/nvcc").is_file():
            return home
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    for home in (*([Path(on_path).resolve().parent.parent] if on_path else []), USUAL_HOME):
        headers = [home / "include" / RUNTIME_HEADER]
        headers += home.glob(f"targets/*/include/{RUNTIME_HEADER}")
        if (home / "bin/nvcc").is_file() and any(header.is_file() for header in headers):
            return home
    return None


def _nvcc_version(home: Path) -> str:
    command = [str(home / "bin/nvcc"), "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if match else ""


def _find_nccl(environ: Mapping[str, str], cuda: Path, site: Path) -> Nccl | None:
    named = [environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME")]
    # The same NCCL that torch itself loads comes before any other.
    for home in (*(Path(name) for name in named if name), site / "nvidia/nccl", cuda, Path("/usr")):
        libraries = sorted(home.glob("lib*/libnccl.so*")) or sorted(home.glob("lib/*/libnccl.so*"))
        if libraries and (home / "include" / "nccl.h").is_file():
            return Nccl(home / "include", libraries[0])
    return None
