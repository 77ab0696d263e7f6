"""Plan the command that builds Horovod's wheel, its environment, and the key of the result."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .facts import Facts, Options, search_path

# This number is raised whenever the same inputs would give other machine code than before.
RECIPE = 1

# Horovod's Gloo has an older cmake_minimum_required than CMake 4 accepts.
_CMAKE_POLICY = {"CMAKE_POLICY_VERSION_MINIMUM": "3.5"}
_FRAMEWORKS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
# These outside settings contradict the plan's, name another generator than make, or (make's own)
# pass a job server to the build that it cannot reach.
_DROPPED = re.compile(
    r"HOROVOD_(WITH|WITHOUT|GPU|NCCL)_?.*|HOROVOD_(CMAKE|SKIP_COMPILE|LOCAL_VERSION|CUDA_HOME)"
    r"|CMAKE_GENERATOR|MAKEFLAGS|MFLAGS|MAKELEVEL|MAKEOVERRIDES|MPI_HOME"
)
# These outside settings are kept, and change the result of the build.
_KEPT = re.compile(r"(CPP|CXX|LD)FLAGS|HOROVOD_(BUILD|CPU|DEBUG|ALLOW).*|CCL_ROOT")


@dataclass(frozen=True)
class Plan:
    """How one wheel is built.

    Args:
        command: what to run.
        environment: what to set for it.
        removed: what to remove from the environment.
        folder: the command's working folder, which receives the wheel.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    removed: tuple[str, ...]
    folder: Path

    def full_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` with this plan's changes."""
        kept = {name: value for name, value in environ.items() if name not in self.removed}
        return {**kept, **self.environment}


def make_plan(
    options: Options, facts: Facts, environ: Mapping[str, str], folder: Path, cmake: str, jobs: int
) -> Plan:
    """Plan a build in `folder`, where the compiler wrapper lies as `cxx`."""
    command = (
        *(sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"),
        # pip's own cache ignores torch and MPI: it would return any earlier build.
        *("--no-cache-dir", "--no-build-isolation", "--no-binary", "horovod"),
        *("--disable-pip-version-check", "--wheel-dir", str(folder)),
        f"horovod=={options.version}",
    )
    environment = {
        **_FRAMEWORKS,
        **_CMAKE_POLICY,
        "CXX": str(folder / "cxx"),
        "PATH": search_path(facts.scripts, environ),
        "HOROVOD_CMAKE": cmake,
        "MAKEFLAGS": f"-j{jobs}",
        f"HOROVOD_{'WITH' if facts.mpi else 'WITHOUT'}_MPI": "1",
        f"HOROVOD_{'WITH' if options.gloo else 'WITHOUT'}_GLOO": "1",
        **_mpi_settings(facts),
        **_gpu_settings(facts, folder),
    }
    removed = tuple(sorted(name for name in environ if _DROPPED.fullmatch(name)))
    return Plan(command, environment, removed, folder)


def build_key(options: Options, facts: Facts, environ: Mapping[str, str]) -> str:
    """Return a name for the wheel of these inputs: wheels of equal keys are interchangeable."""
    text = json.dumps(key_parts(options, facts, environ), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def key_parts(options: Options, facts: Facts, environ: Mapping[str, str]) -> dict[str, object]:
    """Return all that a built wheel depends on, in words."""
    torch, mpi, nccl = facts.torch, facts.mpi, facts.gpu.nccl
    return {
        "recipe": RECIPE,
        "horovod": options.version,
        "python": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
        "platform": [sysconfig.get_platform(), *platform.libc_ver()],
        "cpu": facts.cpu,
        "torch": [torch.version, torch.cuda, torch.cxx11_abi, torch.standard],
        "mpi": [mpi.kind, mpi.version, *_library_places(facts)] if mpi else None,
        "gloo": options.gloo,
        "gpu": [str(facts.gpu.home), facts.gpu.nvcc_version, str(nccl)] if facts.gpu.home else None,
        "settings": {name: environ[name] for name in environ if _KEPT.fullmatch(name)},
    }


def relative_rpaths(facts: Facts) -> list[str]:
    """Return folders of the environment's own MPI, relative to Horovod's library inside it."""
    return [place for place in _library_places(facts) if place.startswith("$ORIGIN")]


def _library_places(facts: Facts) -> list[str]:
    """Return MPI's library folders, relative inside the environment, so that wheels can move."""
    library = facts.site / "horovod" / "torch"
    places = []
    for folder in facts.mpi.library_dirs if facts.mpi else ():
        inside = folder.is_relative_to(facts.prefix)
        place = f"$ORIGIN/{os.path.relpath(folder, library)}" if inside else str(folder)
        places.append(place)
    return list(dict.fromkeys(places))


def _mpi_settings(facts: Facts) -> dict[str, str]:
    return {"MPI_HOME": str(facts.mpi.compiler.parent.parent)} if facts.mpi else {}


def _gpu_settings(facts: Facts, folder: Path) -> dict[str, str]:
    home, nccl = facts.gpu.home, facts.gpu.nccl
    settings = {"HOROVOD_CUDA_HOME": str(home), "CUDA_HOME": str(home)} if home else {}
    if nccl:
        settings |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_INCLUDE": str(nccl.include),
            # PyPI's NCCL has no libnccl.so for the linker: the build makes that link here.
            "HOROVOD_NCCL_LIB": str(folder / "nccl"),
            "HOROVOD_NCCL_LINK": "SHARED",
        }
    return settings
