"""Building once, keeping the wheel, using it again; nothing is really built."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_adaptive.tools.install import install
from hvd_adaptive.tools.install.environment import (
    BUILD_FAILED,
    MISSING,
    NOT_WORKING,
    Gpu,
    InstallError,
    Options,
)
from hvd_adaptive.tools.install.recipe import Plan


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
