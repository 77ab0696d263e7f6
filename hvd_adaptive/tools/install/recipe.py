"""Plan how a wheel is built: command, environment, compiler wrapper, and the key of the result."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .environment import Facts, Options, search_path

# This number is raised whenever the same inputs would give other machine code than before.
RECIPE = 1

# These outside settings contradict the plan's, name another generator than make, or (make's own)
# pass a job server to the build that it cannot reach.
_DROPPED = re.compile(
    r"HOROVOD_(WITH|WITHOUT|GPU|NCCL)_?.*|HOROVOD_(CMAKE|SKIP_COMPILE|LOCAL_VERSION|CUDA_HOME)"
    r"|CMAKE_GENERATOR|MAKEFLAGS|MFLAGS|MAKELEVEL|MAKEOVERRIDES|MPI_HOME"
)
# These outside settings are kept, and change the result of the build.
_KEPT = re.compile(r"(CPP|CXX|LD)FLAGS|HOROVOD_(BUILD|CPU|DEBUG|ALLOW).*|CCL_ROOT")

_WRAPPER = """\
#!/bin/sh
# Written by hvd_adaptive: the real compiler, with the C++ standard that torch's headers need, and
# without debugging symbols, which take a quarter of the time, unless HOROVOD_DEBUG is 1.

# nvcc preprocesses for its own front end with the standard it was given: leave its passes alone.
for word in "$@"; do
    case "$word" in
        -D__CUDACC__* | -D__CUDA_ARCH*) exec {compiler} "$@" ;;
    esac
done

named=no compiles=no shared=no
for word in "$@"; do
    shift
    case "$word" in
        {lower})
            named=yes word=-std=c++{standard} ;;
        -std=*) named=yes ;;
        -g) if [ "$HOROVOD_DEBUG" != 1 ]; then word=-g0; fi ;;
        -c) compiles=yes ;;
        -shared) shared=yes ;;
    esac
    set -- "$@" "$word"
done
if [ $compiles$named = yesno ]; then set -- -std=c++{standard} "$@"; fi
if [ $shared = yes ]; then set -- {rpaths}"$@"; fi
exec {compiler} "$@"
"""


@dataclass(frozen=True)
class Plan:
    """Describe how one wheel is built.

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
    """Plan a build in `folder`, which has the compiler wrapper `cxx`."""
    command = (
        *(sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"),
        # pip's own cache ignores torch and MPI: it would return any earlier build.
        *("--no-cache-dir", "--no-build-isolation", "--no-binary", "horovod"),
        *("--disable-pip-version-check", "--wheel-dir", str(folder)),
        f"horovod=={options.version}",
    )
    environment = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        f"HOROVOD_{'WITH' if facts.mpi else 'WITHOUT'}_MPI": "1",
        f"HOROVOD_{'WITH' if options.gloo else 'WITHOUT'}_GLOO": "1",
        # Horovod's Gloo has an older cmake_minimum_required than CMake 4 accepts.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "CXX": str(folder / "cxx"),
        "PATH": search_path(facts.scripts, environ),
        "HOROVOD_CMAKE": cmake,
        "MAKEFLAGS": f"-j{jobs}",
    }
    if facts.mpi:
        environment["MPI_HOME"] = str(facts.mpi.compiler.parent.parent)
    if facts.gpu.home:
        environment["HOROVOD_CUDA_HOME"] = environment["CUDA_HOME"] = str(facts.gpu.home)
    if facts.gpu.nccl:
        environment |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_INCLUDE": str(facts.gpu.nccl.include),
            # PyPI's NCCL has no libnccl.so for the linker: the build makes that link here.
            "HOROVOD_NCCL_LIB": str(folder / "nccl"),
            "HOROVOD_NCCL_LINK": "SHARED",
        }
    removed = tuple(sorted(name for name in environ if _DROPPED.fullmatch(name)))
    return Plan(command, environment, removed, folder)


def build_key(options: Options, facts: Facts, environ: Mapping[str, str]) -> str:
    """Return a name for the wheel of these inputs: wheels of equal keys are interchangeable."""
    text = json.dumps(key_parts(options, facts, environ), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def key_parts(options: Options, facts: Facts, environ: Mapping[str, str]) -> dict[str, object]:
    """Return all that a built wheel depends on, in words."""
    torch, mpi, gpu = facts.torch, facts.mpi, facts.gpu
    return {
        "recipe": RECIPE,
        "horovod": options.version,
        "python": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
        "platform": [sysconfig.get_platform(), *platform.libc_ver()],
        "cpu": facts.cpu,
        "torch": [torch.version, torch.cuda, torch.standard],
        "mpi": [mpi.kind, mpi.version, *_library_places(facts)] if mpi else None,
        "gloo": options.gloo,
        "gpu": [str(gpu.home), gpu.nvcc_version, str(gpu.nccl)] if gpu.home else None,
        "settings": {name: environ[name] for name in environ if _KEPT.fullmatch(name)},
    }


def relative_rpaths(facts: Facts) -> list[str]:
    """Return folders of the environment's own MPI, relative to Horovod's library inside it."""
    return [place for place in _library_places(facts) if place.startswith("$ORIGIN")]


def _library_places(facts: Facts) -> list[str]:
    """Return MPI's library folders, relative inside the environment, so that wheels can move."""
    library = facts.site / "horovod" / "torch"
    folders = facts.mpi.library_dirs if facts.mpi else ()
    inside = {folder: folder.is_relative_to(facts.prefix) for folder in folders}
    places = [
        f"$ORIGIN/{os.path.relpath(folder, library)}" if relative else str(folder)
        for folder, relative in inside.items()
    ]
    return list(dict.fromkeys(places))


def wrapper_script(compiler: Sequence[str], standard: int, rpaths: Sequence[str] = ()) -> str:
    """Return the text of the compiler wrapper.

    Args:
        compiler: the real compiler's command, which may be several words.
        standard: the C++ standard to which lower ones are raised; higher ones stay.
        rpaths: library folders, relative to the library ($ORIGIN/...), searched before any other.
            They keep a cached wheel from loading the MPI of the environment it was built in.
    """
    spellings = ["98", "03", "11", "0x", "14", "1y", "17", "1z"][: 6 if standard <= 17 else None]
    lower = [f"-std={kind}++{spelling}" for spelling in spellings for kind in ("c", "gnu")]
    return _WRAPPER.format(
        compiler=shlex.join(compiler),
        standard=standard,
        lower=" | ".join(lower),
        rpaths="".join(shlex.quote(f"-Wl,-rpath,{path}") + " " for path in rpaths),
    )
