"""The compiler wrapper, and the command and key that follow from an environment."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from horovod_files import executable, file

from hvd_adaptive.tools.install import preflight, recipe
from hvd_adaptive.tools.install.diagnose import MISSING, InstallError
from hvd_adaptive.tools.install.environment import SCRIPTS, Gpu, Options
from hvd_adaptive.tools.install.recipe import build_key, make_plan, wrapper_script

NCCL = Gpu("", Path("/cuda"), "12.4", (Path("/n/include"), Path("/n/lib/libnccl.so.2")))

# The compiler wrapper


def run_wrapper(facts, folder: Path, given: str) -> str:
    """What the wrapper passes to the real compiler, here a script that prints its arguments."""
    real = executable(folder / "a compiler", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    executable(folder / "cxx", wrapper_script(facts, [str(real), "-first"]))
    command = [folder / "cxx", *shlex.split(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("-first\n")
    return shlex.join(done.stdout.splitlines()[1:])


def test_wrapper_sets_standard_and_debugging_last(facts, tmp_path, monkeypatch):
    monkeypatch.delenv("HOROVOD_DEBUG", raising=False)
    given = "-g -std=gnu++14 '-DNAME=a b' -c x.cc -o 'x y.o'"
    assert run_wrapper(facts, tmp_path, given) == f"{given} -std=c++20 -g0"
    older = replace(facts, torch=replace(facts.torch, standard=17))
    assert run_wrapper(older, tmp_path, given) == f"{given} -std=c++17 -g0"
    monkeypatch.setenv("HOROVOD_DEBUG", "1")
    assert run_wrapper(facts, tmp_path, given) == f"{given} -std=c++20"


@pytest.mark.parametrize(
    "macro", ["-D__CUDA_ARCH_LIST__=800", "-D__CUDA_ARCH__=800", "-D__CUDACC__"]
)
def test_wrapper_leaves_nvcc_passes_alone(facts, tmp_path, macro):
    given = f"-std=c++17 {macro} -E x.cu"
    assert run_wrapper(facts, tmp_path, given) == given


def test_wrapper_puts_the_environments_libraries_first(facts, tmp_path):
    given = "-shared -Wl,-rpath,/built/here -o x.so"
    passed = run_wrapper(facts, tmp_path, given)
    assert passed.startswith(f"'-Wl,-rpath,{facts.mpi.library}' {given} ")
    assert "rpath" not in run_wrapper(facts, tmp_path, "-o program")
    outside = replace(facts, mpi=replace(facts.mpi, compiler=Path("/m/bin/mpicxx")))
    for other in (outside, replace(facts, mpi=None)):
        assert run_wrapper(other, tmp_path, given).startswith(given)


@pytest.mark.skipif(not preflight.find_compiler(), reason="no C++ compiler")
def test_wrapper_with_the_real_compiler(facts, tmp_path):
    source = file(tmp_path / "x.cc", "static_assert(__cplusplus > 201703L);\n")
    compiler = preflight.find_compiler()
    executable(tmp_path / "cxx", wrapper_script(facts, compiler))
    arguments = ["-g", "-std=c++14", "-c", str(source), "-o", str(tmp_path / "x.o")]
    assert subprocess.run([*compiler, *arguments], capture_output=True).returncode != 0
    assert subprocess.run([tmp_path / "cxx", *arguments]).returncode == 0
    assert b".debug_info" not in (tmp_path / "x.o").read_bytes()


# The key


def test_key_changes_with_all_that_changes_the_wheel(facts, monkeypatch):
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
    keys = {build_key(one) for one in (facts, *others)}
    for name, value in (("CXXFLAGS", "-O1"), ("HOROVOD_BUILD_ARCH_FLAGS", "-mavx")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            keys.add(build_key(facts))
    assert len(keys) == len(others) + 3


def test_key_stays_if_the_wheel_does(facts, tmp_path, monkeypatch):
    plain = build_key(facts)
    options = Options(jobs=1, rebuild=True, wheel_dir=tmp_path)
    assert build_key(replace(facts, options=options)) == plain
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "debug")
    assert build_key(facts) == plain


# The plan


@pytest.fixture
def tools(monkeypatch) -> None:
    """What a build needs is there."""
    monkeypatch.setattr(preflight, "problems", lambda standard, mpi: [])
    monkeypatch.setattr(preflight, "find_compiler", lambda: ["g++"])
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")


@pytest.mark.usefixtures("tools")
def test_make_plan_builds_stock_horovod_from_its_sdist(facts, tmp_path, monkeypatch):
    dropped = {
        "MAKEFLAGS": " -j --jobserver-auth=3,4",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_GPU_OPERATIONS": "MPI",
        "CMAKE_GENERATOR": "Ninja",
    }
    for name, value in {**dropped, "HOROVOD_CPU_OPERATIONS": "MPI"}.items():
        monkeypatch.setenv(name, value)
    plan = make_plan(replace(facts, options=Options(jobs=3)), tmp_path)
    assert plan.command[-1] == "horovod==0.28.1"
    assert {"--no-build-isolation", "--no-deps", "--no-cache-dir"} <= set(plan.command)
    assert plan.command[plan.command.index("--no-binary") + 1] == "horovod"
    assert dropped.keys() <= set(plan.removed)
    assert not {"HOROVOD_CPU_OPERATIONS", "PATH", "HOME"} & set(plan.removed)
    set_ = plan.environment
    assert (set_["MAKEFLAGS"], set_["HOROVOD_CMAKE"]) == ("-j3", "/bin/cmake")
    assert (set_["CXX"], set_["MPI_HOME"]) == (str(tmp_path / "cxx"), os.path.dirname(SCRIPTS))
    assert set_["PATH"].startswith(f"{SCRIPTS}{os.pathsep}")
    wanted = ("WITH_PYTORCH", "WITH_MPI", "WITH_GLOO", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET")
    assert all(set_[f"HOROVOD_{name}"] == "1" for name in wanted)


@pytest.mark.usefixtures("tools")
def test_make_plan_without_mpi_and_with_nccl(facts, tmp_path):
    settings = make_plan(replace(facts, mpi=None, gpu=NCCL), tmp_path).environment
    assert settings["HOROVOD_WITHOUT_MPI"] == "1"
    assert not {"HOROVOD_WITH_MPI", "MPI_HOME"} & set(settings)
    assert settings["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert settings["HOROVOD_NCCL_INCLUDE"] == "/n/include"
    assert settings["HOROVOD_CUDA_HOME"] == "/cuda"


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
