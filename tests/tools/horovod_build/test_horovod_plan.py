"""What is found, and the command and key that follow from it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from horovod_files import executable, file

from hvd_adaptive.tools.install import cuda, install
from hvd_adaptive.tools.install.cuda import Gpu, Nccl, find_gpu
from hvd_adaptive.tools.install.diagnose import MISSING, InstallError
from hvd_adaptive.tools.install.environment import Mpi, Options, cpu_features, find_mpi
from hvd_adaptive.tools.install.recipe import build_key, make_plan, relative_rpaths

# MPI, CUDA, CPU


@pytest.mark.parametrize(
    ("words", "kind", "version", "warns"),
    [
        ("mpicxx: Open MPI 4.1.8 (Language: C++)", "Open MPI", "4.1.8", False),
        ("mpicxx: Open MPI 5.0.8 (Language: C++)", "Open MPI", "5.0.8", True),
        ("mpicxx for MPICH version 4.2.3", "MPICH", "4.2.3", False),
        ("mpigxx for the Intel(R) MPI Library 2021.10 for Linux*", "Intel MPI", "2021.10", False),
    ],
)
def test_find_mpi(tmp_path, words, kind, version, warns):
    script = (
        f'#!/bin/sh\ncase "$1" in -v|*:version) echo "{words}";; *) echo -L/m/lib -lmpi;; esac\n'
    )
    executable(tmp_path / "mpicxx", script)
    mpi = find_mpi(f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert mpi == Mpi(tmp_path / "mpicxx", kind, version, (Path("/m/lib"),))
    assert (mpi.warning is not None) == warns
    assert not warns or "horovodrun --mpi" in mpi.warning


def test_no_mpi_on_an_empty_path(tmp_path):
    assert find_mpi(str(tmp_path)) is None


def test_gpu_decisions(tmp_path):
    torch = "12.1"
    site, home = tmp_path / "site", tmp_path / "cuda"
    environ = {"PATH": str(tmp_path / "none"), "HOROVOD_CUDA_HOME": str(home)}
    assert find_gpu("auto", None, environ, site).home is None
    executable(home / "bin" / "nvcc", "#!/bin/sh\necho release 12.4, V12.4.1\n")
    nccl_folder = site / "nvidia" / "nccl"
    if not any(Path(f"/usr/{p}/nccl.h").exists() for p in ("include", "local/nccl/include")):
        assert find_gpu("auto", torch, environ, site).nccl is None
        with pytest.raises(InstallError, match="no NCCL") as raised:
            find_gpu("yes", torch, environ, site)
        assert raised.value.exit_code == MISSING
    file(nccl_folder / "include" / "nccl.h", "")
    library = file(nccl_folder / "lib" / "libnccl.so.2", "")
    gpu = find_gpu("auto", torch, environ, site)
    assert (gpu.home, gpu.nvcc_version) == (home, "12.4")
    assert gpu.nccl == Nccl(nccl_folder / "include", library)
    assert find_gpu("no", torch, environ, site).nccl is None
    other = find_gpu("auto", "13.0", environ, site)
    assert other.nccl is None and "12.4" in other.reason and "13.0" in other.reason


def test_a_script_named_nvcc_is_no_toolkit(tmp_path, monkeypatch):
    """A script on PATH that calls the nvcc of another folder."""
    torch, site = "12.1", tmp_path / "site"
    usual, script = tmp_path / "usual", tmp_path / "local" / "bin" / "nvcc"
    monkeypatch.setattr(cuda, "USUAL_HOME", usual)
    says = "#!/bin/sh\necho release 12.4, V12.4.1\n"
    executable(script, says)
    environ = {"PATH": f"{script.parent}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    gpu = find_gpu("auto", torch, environ, site)
    assert gpu.home is None and "no toolkit" in gpu.reason
    executable(usual / "bin" / "nvcc", says)
    file(usual / "targets" / "x86_64-linux" / "include" / "cuda_runtime.h", "")
    assert find_gpu("auto", torch, environ, site).home == usual
    file(tmp_path / "local" / "include" / "cuda_runtime.h", "")
    assert find_gpu("auto", torch, environ, site).home == tmp_path / "local"


def test_cpu_features_are_those_horovod_uses():
    assert cpu_features("model : x\nflags\t\t: sse fma avx avx2 avx512f\n") == ("avx", "fma")
    assert cpu_features("") == ()


# The plan and its key


def test_key_changes_with_all_that_changes_the_wheel(facts):
    plain = build_key(Options(), facts, {})
    replace, torch, mpi = dataclasses.replace, facts.torch, facts.mpi
    nccl = Nccl(Path("/n/include"), Path("/n/lib/libnccl.so.2"))
    others = [
        build_key(Options(version="0.28.2"), facts, {}),
        build_key(Options(gloo=False), facts, {}),
        build_key(Options(), replace(facts, mpi=None), {}),
        build_key(Options(), replace(facts, mpi=replace(mpi, version="4.1.6")), {}),
        build_key(Options(), replace(facts, mpi=replace(mpi, library_dirs=(Path("/m"),))), {}),
        build_key(Options(), replace(facts, torch=replace(torch, version="2.12.0")), {}),
        build_key(Options(), replace(facts, torch=replace(torch, standard=17)), {}),
        build_key(Options(), replace(facts, cpu=("avx",)), {}),
        build_key(Options(), replace(facts, gpu=Gpu("", Path("/cuda"), "12.4")), {}),
        build_key(Options(), replace(facts, gpu=Gpu("", Path("/cuda"), "12.4", nccl)), {}),
        build_key(Options(), facts, {"CXXFLAGS": "-O1"}),
        build_key(Options(), facts, {"HOROVOD_BUILD_ARCH_FLAGS": "-mavx"}),
    ]
    assert len({plain, *others}) == len(others) + 1


def test_key_stays_where_the_wheel_does(facts, tmp_path):
    plain = build_key(Options(), facts, {})
    assert build_key(Options(jobs=1, rebuild=True, wheel_dir=tmp_path), facts, {}) == plain
    assert build_key(Options(), facts, {"HOME": "/x", "HOROVOD_LOG_LEVEL": "debug"}) == plain


def test_a_wheel_can_move_with_its_environment(facts):
    moved = Path("/somewhere/else")
    mpi = dataclasses.replace(facts.mpi, library_dirs=(moved / "lib",))
    site = moved / "lib" / "python3.11" / "site-packages"
    there = dataclasses.replace(facts, prefix=moved, site=site, mpi=mpi)
    assert build_key(Options(), there, {}) == build_key(Options(), facts, {})
    assert relative_rpaths(facts) == ["$ORIGIN/../../../.."]
    library = facts.site / "horovod" / "torch"
    assert Path(os.path.normpath(library / "../../../..")) == facts.prefix / "lib"


def test_plan_builds_stock_horovod_from_its_sdist(facts, tmp_path):
    environ = {
        "PATH": "/usr/bin",
        "MAKEFLAGS": " -j --jobserver-auth=3,4",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_GPU_OPERATIONS": "MPI",
        "CMAKE_GENERATOR": "Ninja",
        "HOME": "/h",
    }
    plan = make_plan(Options(), facts, environ, tmp_path, "/c/cmake", 3)
    assert plan.command[-1] == "horovod==0.28.1"
    assert {"--no-build-isolation", "--no-deps", "--no-cache-dir"} <= set(plan.command)
    assert plan.command[plan.command.index("--no-binary") + 1] == "horovod"
    full = plan.full_environment(environ)
    assert full["HOME"] == "/h"
    assert full["MAKEFLAGS"] == "-j3"
    assert full["PATH"] == f"{facts.scripts}{os.pathsep}/usr/bin"
    assert full["CXX"] == str(tmp_path / "cxx")
    wanted = ("WITH_PYTORCH", "WITH_MPI", "WITH_GLOO", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET")
    assert all(full[f"HOROVOD_{name}"] == "1" for name in wanted)
    gone = {"HOROVOD_WITH_TENSORFLOW", "HOROVOD_GPU_OPERATIONS", "CMAKE_GENERATOR"}
    assert not gone & set(full)


def test_plan_without_mpi_and_with_nccl(facts, tmp_path):
    nccl = Nccl(Path("/n/include"), Path("/n/lib/libnccl.so.2"))
    changed = dataclasses.replace(facts, mpi=None, gpu=Gpu("", Path("/cuda"), "12.4", nccl))
    settings = make_plan(Options(), changed, {}, tmp_path, "cmake", 1).environment
    assert settings["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in settings
    assert settings["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert settings["HOROVOD_NCCL_INCLUDE"] == "/n/include"
    install.link_nccl(changed, tmp_path)
    link = Path(settings["HOROVOD_NCCL_LIB"], "libnccl.so")
    assert os.readlink(link) == "/n/lib/libnccl.so.2"
