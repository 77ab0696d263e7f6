"""Building once, keeping the wheel, using it again; nothing is really built."""

from __future__ import annotations

import io
import os
import shutil
import time
from pathlib import Path

import pytest
from horovod_files import file
from rich.console import Console

from hvd_adaptive.tools.install import build, install, preflight
from hvd_adaptive.tools.install.diagnose import BUILD_FAILED, InstallError
from hvd_adaptive.tools.install.environment import Options
from hvd_adaptive.tools.install.recipe import Plan

# Running the build, keeping the wheel


def quiet_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def test_progress_is_read_from_makes_percentages():
    log = "[  3%] Building CXX object g/a.cc.o\n  [ 12%] Building CXX object h/b.cc.o\nx\n[ 1"
    assert build.progress_of(log) == "12%  Building CXX object h/b.cc.o"
    assert build.progress_of("warning: 12%") == "fetching and configuring"


def test_run_build_logs_and_returns_the_status(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_EVERY_S", 0.0)
    script = "echo '[ 50%] Building CXX object a/b.cc.o'; echo oops $NAME >&2; sleep 0.4; exit 3"
    plan = Plan(("/bin/sh", "-c", script), {"NAME": "here"}, ("GONE",), tmp_path)
    console = quiet_console()
    environ = {**os.environ, "GONE": "1"}
    assert build.run_build(plan, environ, tmp_path / "log", console) == 3
    assert "oops here" in (tmp_path / "log").read_text()
    assert "s  50%  Building CXX object a/b.cc.o" in console.file.getvalue()


def test_an_interrupt_ends_the_compilers_too(tmp_path, monkeypatch):
    def interrupt(process, log, console):
        while not (tmp_path / "child").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "_follow", interrupt)
    plan = Plan(("/bin/sh", "-c", "sleep 60 & echo $! > new; mv new child; wait"), {}, (), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        build.run_build(plan, os.environ, tmp_path / "log", quiet_console())
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def is_running(process: int) -> bool:
    """Whether the process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_wheels_are_kept_by_key(tmp_path):
    root = build.wheel_root(None, {"XDG_CACHE_HOME": str(tmp_path)})
    assert root == tmp_path / "hvd_adaptive" / "wheels"
    assert build.wheel_root(None, {"XDG_CACHE_HOME": "relative"}) != Path("relative")
    assert build.wheel_root(tmp_path, {}) == tmp_path
    with build.build_folder(root) as folder:
        wheel = file(folder / "horovod-0.28.1-x.whl", "new")
        kept = build.keep_wheel(root, "k1", wheel, file(folder / "build.log", "log"))
    assert not folder.exists()
    assert build.find_wheel(root, "k1") == kept
    assert kept.read_text() == "new"
    assert (root / "k1" / "build.log").read_text() == "log"
    assert build.find_wheel(root, "k2") is None


def test_a_failed_build_keeps_its_log(tmp_path):
    with pytest.raises(InstallError), build.build_folder(tmp_path) as folder:
        raise InstallError("no", exit_code=BUILD_FAILED, log=file(folder / "build.log", "why"))
    assert (folder / "build.log").read_text() == "why"


def test_a_wheel_folder_that_cannot_be_written(tmp_path):
    blocked = file(tmp_path / "a-file", "") / "wheels"
    with pytest.raises(InstallError, match="cannot write") as raised, build.build_folder(blocked):
        pass
    assert "--wheel-dir" in raised.value.hints[0]


def test_problems_name_what_is_wrong(facts, monkeypatch):
    seen = {"version": "0.28.1", "torch": "2.13.0", "mpi": True, "gloo": True, "nccl": False}
    monkeypatch.setattr(install, "probe", lambda: (seen, ""))
    assert install.problems(Options(), facts) == []
    seen |= {"mpi": False, "torch": "2.0"}
    wrong = install.problems(Options(), facts)
    assert wrong == ["torch is 2.0, not 2.13.0", "mpi is False, not True"]


@pytest.fixture
def job(facts, tmp_path, monkeypatch) -> install.Job:
    """A job in the made-up environment; nothing is installed, pip only notes what it is given."""
    monkeypatch.setattr(install, "gather", lambda options, environ: facts)
    monkeypatch.setattr(install, "require_packages", lambda: None)
    monkeypatch.setattr(install, "installed", lambda: (None, None))
    monkeypatch.setattr(install, "problems", lambda options, facts: [])
    monkeypatch.setattr(install, "pip_install", lambda wheel: None)
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return install.Job(Options(), environ, quiet_console())


def fake_build(monkeypatch, log: str, wheel: bool) -> list[Plan]:
    plans: list[Plan] = []

    def run(plan: Plan, environ, path: Path, console) -> int:
        plans.append(plan)
        assert os.access(plan.environment["CXX"], os.X_OK)
        path.write_text(log)
        if wheel:
            file(plan.folder / "horovod-0.28.1-x.whl", "wheel")
        return 0 if wheel else 1

    ready = {
        "problems": lambda environ, standard: [],
        "find_compiler": lambda environ: ("g++",),
    }
    for name, answer in ready.items():
        monkeypatch.setattr(preflight, name, answer)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr(install, "run_build", run)
    return plans


def test_install_builds_once_then_uses_the_cache(job, monkeypatch):
    plans = fake_build(monkeypatch, "fine", wheel=True)
    first = install.install(job)
    assert (first.status, len(plans)) == ("built", 1)
    second = install.install(job)
    assert (second.status, second.wheel, len(plans)) == ("installed from cache", first.wheel, 1)
    job.options = Options(rebuild=True)
    assert (install.install(job).status, len(plans)) == ("built", 2)


def test_install_leaves_a_good_horovod_alone(job, monkeypatch):
    plans = fake_build(monkeypatch, "fine", wheel=True)
    for key in (job.key, None):
        monkeypatch.setattr(install, "installed", lambda key=key: ("0.28.1", key))
        assert install.install(job).status == "already installed"
    assert not plans
    monkeypatch.setattr(install, "installed", lambda: ("0.28.1", "0" * 16))
    assert install.install(job).status == "built"


def test_install_builds_anew_where_a_kept_wheel_does_not_work(job, monkeypatch):
    plans = fake_build(monkeypatch, "fine", wheel=True)
    install.install(job)
    answers = iter([["import fails"], []])
    monkeypatch.setattr(install, "problems", lambda options, facts: next(answers))
    assert install.install(job).status == "built"
    assert len(plans) == 2


def test_a_failed_build_says_why(job, monkeypatch):
    fake_build(monkeypatch, "x.cc: fatal error: mpi.h: No such file or directory\n", wheel=False)
    with pytest.raises(InstallError) as raised:
        install.install(job)
    assert raised.value.exit_code == BUILD_FAILED
    assert "openmpi" in raised.value.hints[0]
    assert "mpi.h" in raised.value.output
    assert raised.value.log.read_text().startswith("x.cc")
