"""Plan how a wheel is built: command, environment, compiler wrapper, and the key of the result."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from hvd_adaptive.tools.processes import search_path

from . import preflight
from .environment import MISSING, Facts, InstallError

# This number is raised whenever the same inputs would give other machine code than before.
RECIPE = 1

# What Horovod builds and runs with, which --no-build-isolation leaves to this package.
_MODULES = ("pip", "setuptools", "wheel", "packaging", "cloudpickle", "psutil", "yaml", "cffi")
# These outside settings are kept, and change the result of the build.
_KEPT = re.compile(r"(CPP|CXX|LD)FLAGS|HOROVOD_(BUILD|CPU|DEBUG|ALLOW).*|CCL_ROOT")
# These may contradict the plan's, or (make's own) pass a job server that the build cannot reach.
_DROPPED = re.compile(rf"(?!{_KEPT.pattern})HOROVOD_.*|CMAKE_GENERATOR|MAKE.*|MFLAGS|MPI_HOME")

_WRAPPER = """\
#!/bin/sh
# Written by hvd_adaptive: the real compiler, with the C++ standard of torch's headers (Horovod's is
# older), without debugging symbols, which take a quarter of the time, unless HOROVOD_DEBUG is 1.
# Of several such options, a compiler obeys the last.
case " $* " in
    # nvcc preprocesses for its own front end with the standard it was given.
    *" -D__CUDACC__"* | *" -D__CUDA_ARCH"*) exec {compiler} "$@" ;;
    # These keep a cached wheel from loading the MPI of the environment it was built in.
    *" -shared "*) set -- {rpaths} "$@" ;;
esac
exec {compiler} "$@" {options}
"""


class Plan(NamedTuple):
    """Describe how one wheel is built: what to run, and which variables are set and removed."""

    command: list[str]
    environment: dict[str, str]
    removed: list[str]
    compiler_wrapper: str


def make_plan(facts: Facts, folder: Path) -> Plan:
    """Plan a build in `folder`; raise InstallError that names all that it lacks."""
    compiler, cmake = preflight.find_compiler(), shutil.which("cmake", path=search_path())
    mpi = facts.mpi.compiler if facts.mpi else Path()
    missing = preflight.problems(facts.torch.standard, mpi)
    absent = [name for name in _MODULES if not importlib.util.find_spec(name)]
    if packages := " ".join(absent if cmake else [*absent, "cmake"]).replace("yaml", "pyyaml"):
        missing.append(f"packages are missing: {sys.executable} -m pip install {packages}")
    if missing or compiler is None or cmake is None:
        raise InstallError("Horovod cannot be built yet", MISSING, missing)
    # pip's own cache ignores torch and MPI: it would return any earlier build.
    words = "-m pip wheel --verbose --no-deps --no-cache-dir --no-build-isolation"
    words += " --no-binary horovod --disable-pip-version-check --wheel-dir"
    command = [sys.executable, *words.split(), str(folder), f"horovod=={facts.options.version}"]
    # As many compilers run at once as there are cores, and 2 GiB of free memory for each.
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**31
    jobs = facts.options.jobs or max(1, min(len(os.sched_getaffinity(0)), free))
    parts = {"PYTORCH": True, "TENSORFLOW": False, "MXNET": False}
    parts |= {"MPI": facts.mpi is not None, "GLOO": facts.options.gloo}
    settings = {
        **{f"HOROVOD_{'WITH' if has else 'WITHOUT'}_{name}": "1" for name, has in parts.items()},
        # Horovod's Gloo has an older cmake_minimum_required than CMake 4 accepts.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_CMAKE": cmake,
        "CXX": str(folder / "cxx"),
        "PATH": search_path(),
        "MAKEFLAGS": f"-j{jobs}",
    }
    if facts.mpi:
        settings["MPI_HOME"] = str(facts.mpi.compiler.parent.parent)
    if facts.gpu.home:
        settings["HOROVOD_CUDA_HOME"] = settings["CUDA_HOME"] = str(facts.gpu.home)
    if facts.gpu.nccl:
        settings |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}
        settings["HOROVOD_NCCL_INCLUDE"] = str(facts.gpu.nccl[0])
        # PyPI's NCCL has no libnccl.so for the linker: `build` makes that link here.
        settings["HOROVOD_NCCL_LIB"] = str(folder)
    removed = sorted(name for name in os.environ if _DROPPED.fullmatch(name))
    return Plan(command, settings, removed, wrapper_script(facts, compiler))


def wrapper_script(facts: Facts, compiler: list[str]) -> str:
    """Return the text of the compiler wrapper around the command `compiler`."""
    debug = os.environ.get("HOROVOD_DEBUG") == "1"
    library = facts.mpi.library if facts.mpi else ""
    return _WRAPPER.format(
        compiler=shlex.join(compiler),
        options=f"-std=c++{facts.torch.standard}" + ("" if debug else " -g0"),
        rpaths=shlex.quote(f"-Wl,-rpath,{library}") if library.startswith("$ORIGIN") else "",
    )


def build_key(facts: Facts) -> str:
    """Return a name for the wheel of these inputs: wheels of equal keys are interchangeable."""
    return hashlib.sha256(json.dumps(key_parts(facts), sort_keys=True).encode()).hexdigest()[:16]


def key_parts(facts: Facts) -> dict[str, object]:
    """Return all that a built wheel depends on, in words."""
    torch, mpi, gpu = facts.torch, facts.mpi, facts.gpu
    return {
        "recipe": RECIPE,
        "horovod": facts.options.version,
        "python": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
        "platform": [sysconfig.get_platform(), *platform.libc_ver()],
        "cpu": facts.cpu,
        "torch": [torch.version, torch.cuda, torch.standard],
        "mpi": [*mpi.name.rsplit(" ", 1), mpi.library] if mpi else None,
        "gloo": facts.options.gloo,
        "gpu": [str(gpu.home), gpu.nvcc_version, str(gpu.nccl)] if gpu.home else None,
        "settings": {name: one for name, one in os.environ.items() if _KEPT.fullmatch(name)},
    }
