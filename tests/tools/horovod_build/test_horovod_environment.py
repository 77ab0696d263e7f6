"""What is found of torch, MPI, CUDA and NCCL."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_adaptive.tools.install import environment
from hvd_adaptive.tools.install.diagnose import MISSING, InstallError
from hvd_adaptive.tools.install.environment import Mpi, Torch, find_gpu, find_mpi, find_torch

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
    torch = SimpleNamespace(origin=str(file("version.py", about).with_name("__init__.py")))
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
