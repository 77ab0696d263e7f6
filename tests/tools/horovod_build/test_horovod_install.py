"""Building once, keeping the wheel, using it again; nothing is really built."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from horovod_files import file

from hvd_adaptive.tools.install import install, preflight
from hvd_adaptive.tools.install.diagnose import BUILD_FAILED, MISSING, NOT_WORKING, InstallError
from hvd_adaptive.tools.install.environment import Facts, Gpu, Options
from hvd_adaptive.tools.install.recipe import Plan

# Running the build


def test_run_build_logs_and_returns_the_status(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "_EVERY_S", 1)
    monkeypatch.setenv("GONE", "1")
    said: list[str] = []
    script = (
        "echo '[ 50%] Building CXX object a/b.cc.o'; echo oops $NAME$GONE >&2; sleep 1.5; exit 3"
    )
    plan = Plan(["/bin/sh", "-c", script], {"NAME": "here"}, ["GONE"], "")
    assert install.run_build(plan, tmp_path / "log", said.append) == 3
    assert "oops here\n" in (tmp_path / "log").read_text()
    assert said == ["     1 s  [ 50%] Building CXX object a/b.cc.o"]


def test_run_build_ends_the_compilers_if_interrupted(tmp_path, monkeypatch):
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "_EVERY_S", 1)
    script = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(KeyboardInterrupt):
        install.run_build(Plan(["/bin/sh", "-c", script], {}, [], ""), tmp_path / "log", interrupt)
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "cmdline")
    assert not child.exists() or not child.read_bytes()


# What is done


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The folder of kept wheels; nothing is installed, and pip installs nothing."""
    monkeypatch.setattr(install, "installed_key", lambda: None)
    monkeypatch.setattr(install, "problems", answers(["not installed"], []))
    monkeypatch.setattr(install, "pip_install", lambda wheel: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hvd_adaptive" / "wheels"


def answers(*lists: list[str]):
    """A stand-in for `problems` that returns these in turn, and then the last one."""
    left = list(lists)
    return lambda facts: left.pop(0) if len(left) > 1 else left[0]


def fake_build(monkeypatch, log: str, wheel: bool) -> list[Plan]:
    """Let each build write a log and perhaps a wheel; return the list of builds."""
    plans: list[Plan] = []

    def run(plan: Plan, path: Path, says) -> int:
        plans.append(plan)
        assert os.access(plan.environment["CXX"], os.X_OK)
        path.write_text(log)
        if wheel:
            file(Path(plan.environment["CXX"]).with_name("horovod-0.28.1-x.whl"), "wheel")
        return 0 if wheel else 1

    monkeypatch.setattr(preflight, "problems", lambda standard, mpi: [])
    monkeypatch.setattr(preflight, "find_compiler", lambda: ["g++"])
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr(install, "run_build", run)
    return plans


def test_install_builds_once_then_uses_the_cache(facts, place, monkeypatch):
    plans = fake_build(monkeypatch, "fine", wheel=True)
    status, wheel = install.install(facts, print)
    assert (status, wheel.read_text(), len(plans)) == ("built", "wheel", 1)
    assert wheel.parent.parent == place
    assert sorted(one.name for one in wheel.parent.iterdir()) == ["build.log", wheel.name]
    monkeypatch.setattr(install, "problems", answers(["not installed"], []))
    assert install.install(facts, print) == ("installed from cache", wheel)
    rebuild = replace(facts, options=Options(rebuild=True))
    assert (install.install(rebuild, print)[0], len(plans)) == ("built", 2)


def test_install_leaves_a_good_horovod_alone(facts, place, monkeypatch):
    plans = fake_build(monkeypatch, "fine", wheel=True)
    monkeypatch.setattr(install, "problems", answers([]))
    for key in (install.wheel_folder(facts).name, None):
        monkeypatch.setattr(install, "installed_key", lambda key=key: key)
        assert install.install(facts, print) == ("already installed", None)
    assert not plans
    monkeypatch.setattr(install, "installed_key", lambda: "0" * 16)
    assert install.install(facts, print)[0] == "built"


def test_install_builds_anew_if_a_kept_wheel_does_not_work(facts, place, monkeypatch):
    plans = fake_build(monkeypatch, "fine", wheel=True)
    install.install(facts, print)
    monkeypatch.setattr(install, "problems", answers(["torch is 2.0"], ["import fails"], []))
    assert (install.install(facts, print)[0], len(plans)) == ("built", 2)


def test_install_fails_if_what_was_built_does_not_work(facts, place, monkeypatch):
    fake_build(monkeypatch, "fine", wheel=True)
    monkeypatch.setattr(install, "problems", answers(["mpi is False, not True"]))
    with pytest.raises(InstallError, match="mpi is False") as raised:
        install.install(facts, print)
    assert raised.value.exit_code == NOT_WORKING


def test_install_says_why_a_build_failed(facts, place, monkeypatch):
    fake_build(monkeypatch, "x.cc: fatal error: mpi.h: No such file or directory\n", wheel=False)
    with pytest.raises(InstallError) as raised:
        install.install(facts, print)
    assert raised.value.exit_code == BUILD_FAILED
    assert "openmpi" in raised.value.hints[0]
    assert "mpi.h" in raised.value.output
    assert raised.value.log.read_text().startswith("x.cc")


def test_build_gives_the_linker_nccls_library(facts, tmp_path, monkeypatch):
    plans = fake_build(monkeypatch, "", wheel=True)
    run = install.run_build
    links: list[str] = []

    def look(plan: Plan, log: Path, says) -> int:
        links.append(os.readlink(Path(plan.environment["HOROVOD_NCCL_LIB"], "libnccl.so")))
        return run(plan, log, says)

    monkeypatch.setattr(install, "run_build", look)
    nccl = (Path("/n/include"), Path("/n/lib/libnccl.so.2"))
    install.build(replace(facts, gpu=Gpu("", Path("/c"), "12.4", nccl)), tmp_path, print)
    assert (links, len(plans)) == (["/n/lib/libnccl.so.2"], 1)


def test_build_names_a_folder_that_cannot_be_written(facts, tmp_path):
    blocked = file(tmp_path / "a-file", "") / "wheels"
    with pytest.raises(InstallError, match="cannot write") as raised:
        install.build(facts, blocked, print)
    assert raised.value.exit_code == MISSING
    assert "--wheel-dir" in raised.value.hints[0]


# The Horovod that is installed


def test_problems_name_what_is_wrong(facts, monkeypatch):
    seen = {"version": "0.28.1", "torch": "2.13.0", "mpi": True, "gloo": True, "nccl": False}
    monkeypatch.setattr(install, "probe", lambda: (seen, ""))
    assert install.problems(facts) == []
    seen |= {"mpi": False, "torch": "2.0"}
    assert install.problems(facts) == ["torch is 2.0, not 2.13.0", "mpi is False, not True"]


def test_problems_of_the_one_installed_here(facts: Facts):
    horovod = pytest.importorskip("horovod")
    found = install.problems(replace(facts, options=Options(version="0.0.1")))
    assert f"version is {horovod.__version__}, not 0.0.1" in found


def test_problems_of_one_that_cannot_be_imported(facts, monkeypatch):
    monkeypatch.setattr(install, "_PROBE", "raise ImportError('undefined symbol')")
    (found,) = install.problems(facts)
    assert found.startswith("import horovod.torch fails: ")
    assert found.endswith("ImportError: undefined symbol")


def test_installed_key_is_the_folder_of_the_kept_wheel(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    about = tmp_path / "horovod-0.28.1.dist-info"
    file(about / "METADATA", "Name: horovod\nVersion: 0.28.1\n")
    url = '{"url": "file:///c/0123456789abcdef/horovod-0.28.1-cp311-cp311-linux_x86_64.whl"}'
    file(about / "direct_url.json", url)
    assert install.installed_key() == "0123456789abcdef"
