"""The compiler wrapper, and the C++ standard that it is given."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from horovod_files import executable, file

from hvd_adaptive.tools.install import preflight
from hvd_adaptive.tools.install.environment import Torch, find_torch, required_standard
from hvd_adaptive.tools.install.recipe import wrapper_script

# The compiler wrapper


def run_wrapper(folder: Path, standard: int, arguments: list[str], rpaths=()) -> list[str]:
    """What the wrapper passes to the real compiler, here a script that prints its arguments."""
    real = executable(folder / "a compiler", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    executable(folder / "cxx", wrapper_script([str(real), "-first"], standard, rpaths))
    done = subprocess.run([folder / "cxx", *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("-first\n")
    return done.stdout.splitlines()[1:]


@pytest.mark.parametrize(
    "flag",
    [
        "-std=c++11",
        "-std=c++14",
        "-std=gnu++14",
        "-std=c++17",
        "-std=c++1z",
        "-std=gnu++17",
    ],
)
def test_wrapper_raises_lower_standards(tmp_path, flag):
    given = ["-O2", flag, "-DNAME=a b", "-c", "x.cc", "-o", "x y.o"]
    expected = ["-O2", "-std=c++20", "-DNAME=a b", "-c", "x.cc", "-o", "x y.o"]
    assert run_wrapper(tmp_path, 20, given) == expected


@pytest.mark.parametrize("flag", ["-std=c++20", "-std=c++23", "-std=gnu++2a", "-std=c17"])
def test_wrapper_keeps_other_standards(tmp_path, flag):
    assert run_wrapper(tmp_path, 20, [flag, "-c", "x.cc"]) == [flag, "-c", "x.cc"]


def test_wrapper_raises_only_to_what_is_needed(tmp_path):
    assert run_wrapper(tmp_path, 17, ["-std=c++14", "-c", "x"]) == ["-std=c++17", "-c", "x"]
    assert run_wrapper(tmp_path, 17, ["-std=c++17", "-c", "x"]) == ["-std=c++17", "-c", "x"]


def test_wrapper_names_the_standard_where_none_is_named(tmp_path):
    assert run_wrapper(tmp_path, 20, ["-c", "x.cc"]) == ["-std=c++20", "-c", "x.cc"]
    assert run_wrapper(tmp_path, 20, ["--version"]) == ["--version"]


def test_wrapper_leaves_out_debugging_symbols(tmp_path, monkeypatch):
    given = ["-O3", "-g", "-std=c++20", "-c", "x.cc"]
    monkeypatch.delenv("HOROVOD_DEBUG", raising=False)
    assert run_wrapper(tmp_path, 20, given) == ["-O3", "-g0", "-std=c++20", "-c", "x.cc"]
    monkeypatch.setenv("HOROVOD_DEBUG", "1")
    assert run_wrapper(tmp_path, 20, given) == given


@pytest.mark.parametrize(
    "macro", ["-D__CUDA_ARCH_LIST__=800", "-D__CUDA_ARCH__=800", "-D__CUDACC__"]
)
def test_wrapper_leaves_nvcc_passes_alone(tmp_path, macro):
    given = ["-std=c++17", macro, "-E", "x.cu"]
    assert run_wrapper(tmp_path, 20, given) == given


def test_wrapper_puts_the_environments_libraries_first(tmp_path):
    given = ["-shared", "-Wl,-rpath,/built/here", "-o", "x.so"]
    passed = run_wrapper(tmp_path, 20, given, ["$ORIGIN/../lib"])
    assert passed == ["-Wl,-rpath,$ORIGIN/../lib", *given]
    assert run_wrapper(tmp_path, 20, ["-o", "program"], ["$ORIGIN/../lib"]) == ["-o", "program"]


@pytest.mark.skipif(not preflight.find_compiler(os.environ), reason="no C++ compiler")
def test_wrapper_with_the_real_compiler(tmp_path):
    source = file(tmp_path / "x.cc", "static_assert(__cplusplus > 201703L);\n")
    compiler = preflight.find_compiler(os.environ)
    executable(tmp_path / "cxx", wrapper_script(compiler, 20))
    arguments = ["-std=c++14", "-c", str(source), "-o", str(tmp_path / "x.o")]
    assert subprocess.run([*compiler, *arguments], capture_output=True).returncode != 0
    assert subprocess.run([tmp_path / "cxx", *arguments]).returncode == 0


# Which standard torch needs


@pytest.mark.parametrize(
    ("text", "standard"),
    [
        ("cflags = common + ['-fPIC', '-std=c++20']\n", 20),
        ("cpp_flag = cpp_flag_prefix + 'c++17'\n", 17),
        ("flags = ['-std=c++17', '-std=c++20']\n", 20),
    ],
)
def test_standard_is_that_of_torchs_own_extensions(tmp_path, text, standard):
    file(tmp_path / "utils/cpp_extension.py", text)
    assert required_standard(tmp_path) == standard


def test_standard_ignores_comments_and_doctests(tmp_path):
    text = "# '-std=c++26' one day\n  ... flags=['-std=c++23']\nflags = ['-std=c++17']\n"
    file(tmp_path / "utils/cpp_extension.py", text)
    assert required_standard(tmp_path) == 17


def test_standard_is_20_if_torch_names_none(tmp_path):
    assert required_standard(tmp_path) == 20


def test_find_torch_reads_files_only(tmp_path):
    about = "__version__ = '2.4.1+cu121'\ndebug = False\ncuda: Optional[str] = '12.1'\n"
    file(tmp_path / "version.py", about)
    file(tmp_path / "utils/cpp_extension.py", "flags = ['-std=c++17']\n")
    assert find_torch(tmp_path) == Torch("2.4.1+cu121", "12.1", 17)
    file(tmp_path / "version.py", "__version__ = '2.13.0'\ncuda: Optional[str] = None\n")
    assert find_torch(tmp_path).cuda is None


def test_the_real_torch():
    import torch

    found = find_torch()
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda
    if torch.__version__.startswith("2.13"):
        assert found.standard == 20
