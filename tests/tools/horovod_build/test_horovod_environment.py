"""What is found of torch, MPI, CUDA and NCCL; the compiler wrapper, command and key that follow."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_adaptive.tools.install import environment, preflight, recipe
from hvd_adaptive.tools.install.environment import (
    MISSING,
    Gpu,
    InstallError,
    Mpi,
    Options,
    Torch,
    find_gpu,
    find_mpi,
    find_torch,
)
from hvd_adaptive.tools.install.recipe import build_key, make_plan, wrapper_script

NVCC = "#!/bin/sh\necho release 12.4, V12.4.1\n"


@pytest.mark.parametrize(
    ("words", "name", "warns"),
    [
        ("mpicxx: Open MPI 4.1.8 (Language: C++)", "Open MPI 4.1.8", False),
        ("mpicxx: Open MPI 5.0.8 (Language: C++)", "Open MPI 5.0.8", True),
        ("mpicxx for MPICH version 4.2.3", "MPICH 4.2.3", False),
        ("mpigxx for the Intel(R) MPI Library 2021.10 for Linux*", "Intel(R) MPI 2021.10", False),
        ("another", "MPI", False),
    ],
)
def test_find_mpi(file, words, name, warns):
    option = "-showme:version" if "Open" in words else "-v"
    compiler = file("mpicxx", f'#!/bin/sh\ntest "$1" = {option} && echo "{words}"\n')
    mpi = find_mpi(f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    assert mpi == Mpi(compiler, name)
    assert (mpi.warning is not None) == warns


def test_mpi_library_is_relative_inside_the_environment(facts):
    relative = facts.mpi.library.removeprefix("$ORIGIN/")
    library = environment.SITE / "horovod" / "torch"
    assert Path(os.path.normpath(library / relative)) == facts.mpi.compiler.parent.parent / "lib"
    assert Mpi(Path("/m/bin/mpicxx"), "MPI").library == "/m/lib"


@pytest.fixture
def cuda(tmp_path, file, monkeypatch) -> Path:
    """A CUDA 12.4 that HOROVOD_CUDA_HOME names; nothing else of CUDA or NCCL is found."""
    monkeypatch.setattr(environment, "SITE", tmp_path / "site")
    monkeypatch.setattr(environment, "USUAL_CUDA", tmp_path / "usual")
    for name in ("CUDA_HOME", "HOROVOD_NCCL_HOME", "NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)
    file("cuda/bin/nvcc", NVCC)
    home = file("cuda/include/cuda_runtime.h").parent.parent
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return home


def test_find_gpu(cuda, file, monkeypatch):
    assert find_gpu("auto", None).home is None
    if not Path("/usr/include/nccl.h").exists():
        assert find_gpu("auto", "12.1").nccl is None
        with pytest.raises(InstallError, match="no NCCL") as raised:
            find_gpu("yes", "12.1")
        assert raised.value.exit_code == MISSING
    header = file("site/nvidia/nccl/include/nccl.h")
    library = file("site/nvidia/nccl/lib/libnccl.so.2")
    gpu = find_gpu("yes", "12.1")
    assert (gpu.home, gpu.nvcc_version, gpu.nccl) == (cuda, "12.4", (header.parent, library))
    assert find_gpu("no", "12.1").nccl is None
    other = find_gpu("auto", "13.0")
    assert other.nccl is None and "12.4" in other.reason and "13.0" in other.reason
    file("named/lib64/libnccl.so")
    named = file("named/include/nccl.h").parent
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(named.parent))
    assert find_gpu("auto", "12.1").nccl[0] == named


def test_find_gpu_takes_no_script_named_nvcc_for_a_toolkit(cuda, file, monkeypatch):
    """A script on PATH that calls the nvcc of another folder."""
    monkeypatch.delenv("HOROVOD_CUDA_HOME")
    monkeypatch.setenv("PATH", f"{file('local/bin/nvcc', NVCC).parent}:{os.environ['PATH']}")
    gpu = find_gpu("auto", "12.1")
    assert gpu.home is None and "no toolkit" in gpu.reason
    file("usual/targets/x86_64-linux/include/cuda_runtime.h")
    usual = file("usual/bin/nvcc", NVCC).parent.parent
    assert find_gpu("auto", "12.1").home == usual
    local = file("local/include/cuda_runtime.h").parent.parent
    assert find_gpu("auto", "12.1").home == local


def test_what_is_read_of_torch(file, monkeypatch):
    about = "__version__ = '2.4.1+cu121'\ncuda: 'str | None' = '12.1'\n"
    origin = str(file("version.py", about).with_name("__init__.py"))
    torch = SimpleNamespace(origin=origin, submodule_search_locations=None)  # coverage reads it
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: torch)
    for code, standard in (("'-std=c++17', '-std=c++20'", 20), ("prefix + 'c++17'", 17), ("", 20)):
        file("utils/cpp_extension.py", code)
        assert find_torch() == Torch("2.4.1+cu121", "12.1", standard)


def test_find_torch(monkeypatch):
    import torch

    found = find_torch()
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InstallError, match="torch is not installed") as raised:
        find_torch()
    assert raised.value.exit_code == MISSING


NCCL = Gpu("", Path("/cuda"), "12.4", (Path("/n/include"), Path("/n/lib/libnccl.so.2")))


@pytest.fixture
def wrapped(file):
    """What the wrapper passes to the real compiler, here a script that prints its arguments."""
    real = file("a compiler", '#!/bin/sh\nprintf "%s\\n" "$@"\n')

    def run(facts, given: str) -> str:
        wrapper = file("cxx", wrapper_script(facts, [str(real), "-first"]))
        command = [wrapper, *shlex.split(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return shlex.join(done.stdout.splitlines())

    return run


@pytest.mark.parametrize(
    ("given", "before", "after"),
    [
        ("-g -std=gnu++14 '-DNAME=a b' -c x.cc -o 'x y.o'", "", " -std=c++20 -g0"),
        ("-std=c++17 -D__CUDA_ARCH_LIST__=800 -E x.cu", "", ""),  # a pass of nvcc
        ("-std=c++17 -D__CUDA_ARCH__=800 -E x.cu", "", ""),
        ("-std=c++17 -D__CUDACC__ -E x.cu", "", ""),
        ("-shared -Wl,-rpath,/built/here -o x.so", "'-Wl,-rpath,{}' ", " -std=c++20 -g0"),
    ],
)
def test_wrapper(facts, wrapped, monkeypatch, given, before, after):
    """The standard and debugging come last, the environment's libraries first."""
    monkeypatch.delenv("HOROVOD_DEBUG", raising=False)
    assert wrapped(facts, given) == f"-first {before.format(facts.mpi.library)}{given}{after}"


def test_wrapper_of_other_facts(facts, wrapped, monkeypatch):
    monkeypatch.setenv("HOROVOD_DEBUG", "1")
    given = "-shared -o x.so"
    older = replace(facts, torch=replace(facts.torch, standard=17), mpi=None)
    assert wrapped(older, given) == f"-first {given} -std=c++17"


def test_key_changes_with_all_that_changes_the_wheel(facts, tmp_path, monkeypatch):
    mpi, torch = facts.mpi, facts.torch
    others = [
        replace(facts, options=Options(version="0.28.2")),
        replace(facts, options=Options(gloo=False)),
        replace(facts, mpi=None),
        replace(facts, mpi=replace(mpi, name="Open MPI 4.1.6")),
        replace(facts, mpi=replace(mpi, compiler=Path("/m/bin/mpicxx"))),
        replace(facts, torch=replace(torch, version="2.12.0")),
        replace(facts, torch=replace(torch, standard=17)),
        replace(facts, cpu=("avx",)),
        replace(facts, gpu=replace(NCCL, nccl=None)),
        replace(facts, gpu=NCCL),
    ]
    same = replace(facts, options=Options(jobs=1, rebuild=True, wheel_dir=tmp_path))
    keys = {build_key(one) for one in (facts, same, *others)}
    for name in ("CXXFLAGS", "HOROVOD_BUILD_ARCH_FLAGS"):
        monkeypatch.setenv(name, "-mavx")
        keys.add(build_key(facts))
    assert len(keys) == 1 + len(others) + 2


@pytest.mark.usefixtures("tools")
def test_make_plan_builds_stock_horovod_from_its_sdist(facts, monkeypatch):
    dropped = {"MAKEFLAGS", "HOROVOD_WITH_TENSORFLOW", "HOROVOD_GPU_OPERATIONS", "CMAKE_GENERATOR"}
    for name in (*dropped, "HOROVOD_CPU_OPERATIONS"):
        monkeypatch.setenv(name, "MPI")
    plan = make_plan(replace(facts, options=Options(jobs=3)), Path("/place"))
    assert plan.command[-1] == "horovod==0.28.1"
    assert {"--no-build-isolation", "--no-deps", "--no-cache-dir"} <= set(plan.command)
    assert plan.command[plan.command.index("--no-binary") + 1] == "horovod"
    assert dropped <= set(plan.removed)
    assert not {"HOROVOD_CPU_OPERATIONS", "PATH", "HOME"} & set(plan.removed)
    wanted = ("WITH_PYTORCH", "WITH_MPI", "WITH_GLOO", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET")
    expected = {f"HOROVOD_{name}": "1" for name in wanted}
    expected |= {"MAKEFLAGS": "-j3", "HOROVOD_CMAKE": "/bin/cmake", "CXX": "/place/cxx"}
    assert expected.items() <= plan.environment.items()
    assert plan.environment["MPI_HOME"] == str(facts.mpi.compiler.parent.parent)
    assert plan.environment["PATH"].startswith(f"{sysconfig.get_path('scripts')}:")


@pytest.mark.usefixtures("tools")
def test_make_plan_without_mpi_and_with_nccl(facts):
    settings = make_plan(replace(facts, mpi=None, gpu=NCCL), Path("/place")).environment
    assert not {"HOROVOD_WITH_MPI", "MPI_HOME"} & set(settings)
    expected = {"HOROVOD_WITHOUT_MPI": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    expected |= {"HOROVOD_NCCL_INCLUDE": "/n/include", "HOROVOD_CUDA_HOME": "/cuda"}
    assert expected.items() <= settings.items()


@pytest.mark.usefixtures("tools")
def test_make_plan_names_all_that_is_missing(facts, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "problems", lambda standard, mpi: ["no compiler"])
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(recipe, "_MODULES", ("json", "yaml", "cffi"))
    monkeypatch.setattr(recipe.importlib.util, "find_spec", lambda name: name == "json")
    with pytest.raises(InstallError, match="cannot be built") as raised:
        make_plan(facts, tmp_path)
    assert raised.value.exit_code == MISSING
    compiler, packages = raised.value.hints
    assert compiler == "no compiler"
    assert packages.endswith("pip install pyyaml cffi cmake")
