"""The commands by which tools/launch.py starts ranks; that they work is in tests/parallel. A job of
tools/processes.py ends with all that came of it, whatever these processes did to hide."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from hvd_adaptive.tools import launch
from hvd_adaptive.tools.launch import LAUNCHERS, Ranks, RanksError, missing
from hvd_adaptive.tools.processes import GRACE_S, Job

PROGRAM = ["python", "train.py"]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Both launchers are installed, and mpirun is Open MPI's."""
    programs = {"mpi": "/bin/mpirun", "gloo": "/bin/horovodrun"}
    monkeypatch.setattr(launch, "_found", programs.get)
    monkeypatch.setattr(launch, "_is_open_mpi", lambda: True)


def settings(command: list[str]) -> dict[str, str]:
    """Of Open MPI, by name."""
    places = [place for place, word in enumerate(command) if word == "--mca"]
    return {command[place + 1]: command[place + 2] for place in places}


def test_on_this_machine():
    mpirun, gloo = (Ranks(3, launcher).command(PROGRAM) for launcher in LAUNCHERS)
    assert mpirun[:3] == ["/bin/mpirun", "-np", "3"] and mpirun[-2:] == PROGRAM
    assert {"--oversubscribe", "--bind-to"} <= set(mpirun) and "-x" not in mpirun
    assert settings(mpirun) == {"mpi_yield_when_idle": "1"}
    assert gloo[0] == "/bin/horovodrun" and gloo[-2:] == PROGRAM
    assert "--gloo" in gloo and gloo[gloo.index("-H") + 1] == "localhost:3"


def test_ranks_of_one_host_over_tcp():
    assert settings(Ranks(2, tcp=True).command(PROGRAM))["btl"] == "tcp,self"


def test_on_other_machines(monkeypatch):
    """Ranks there get this environment's programs; a variable that is not set is not exported."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for launcher in LAUNCHERS:
        command = Ranks(4, launcher, hosts="a:2,b:2").command(PROGRAM)
        assert command[command.index("-H") + 1] == "a:2,b:2"
    mpirun = Ranks(4, hosts="a:2,b:2").command(PROGRAM)
    exported = [mpirun[place + 1] for place, word in enumerate(mpirun) if word == "-x"]
    assert exported == ["PATH", "PYTHONPATH"]


def test_on_an_interface_and_by_another_shell():
    ranks = Ranks(4, hosts="a:2,b:2", interface="lab0", remote_shell="/lab/ssh")
    own = settings(ranks.command(PROGRAM))
    assert own["btl_tcp_if_include"] == own["oob_tcp_if_include"] == "lab0"
    assert (own["btl"], own["plm_rsh_agent"]) == ("tcp,vader,self", "/lab/ssh")
    gloo = Ranks(4, "gloo", hosts="a:2,b:2", interface="lab0").command(PROGRAM)
    assert gloo[gloo.index("--network-interface") + 1] == "lab0"


def test_another_mpi_gets_no_options_of_open_mpi(monkeypatch):
    monkeypatch.setattr(launch, "_is_open_mpi", lambda: False)
    assert Ranks(2).command(PROGRAM) == ["/bin/mpirun", "-np", "2", *PROGRAM]


def test_open_mpi_is_recognized(monkeypatch, tmp_path):
    monkeypatch.undo()
    program = tmp_path / "mpirun"
    monkeypatch.setattr(launch, "_found", lambda launcher: str(program))
    for text, is_open in (("mpirun (Open MPI) 4.1.8", True), ("HYDRA build details", False)):
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
        assert launch._is_open_mpi() is is_open


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_missing_program_is_named_with_its_remedy(monkeypatch, launcher):
    monkeypatch.setattr(launch, "_found", lambda name: None)
    program, remedy = launch.PROGRAMS[launcher]
    with pytest.raises(RanksError, match=f"{program} was not found: ") as error:
        Ranks(2, launcher).command(PROGRAM)
    assert remedy in str(error.value) and missing([launcher]) == [str(error.value)]
    assert len(missing(LAUNCHERS)) == 2


def test_ranks_import_this_package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    first, *others = Ranks(2).environment()["PYTHONPATH"].split(":")
    assert Path(first) == Path(launch.__file__).parents[2] and others == ["/theirs"]


# Starts a grandchild that leaves its session, its group and its parent, and ignores SIGTERM.
DAEMON = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    os._exit(0) if {leaves} else time.sleep(600)
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def daemon(leaves: bool) -> list[str]:
    return [sys.executable, "-c", DAEMON.format(leaves=leaves)]


def pid_of(job: Job) -> int:
    """Of the grandchild, once it has printed."""
    while not job.text().endswith("\n"):
        assert time.monotonic() < job.deadline
        time.sleep(0.01)
    return int(job.text())


def has_ended(pid: int) -> bool:
    """Whether nothing of it runs; its new parent may not have fetched its exit status yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("leaves", [True, False], ids=["command ends first", "command hangs"])
def test_daemons_end_with_the_job(leaves, monkeypatch):
    monkeypatch.setattr("hvd_adaptive.tools.processes.GRACE_S", 0.5)
    job = Job(daemon(leaves), 30.0)
    pid = pid_of(job)
    assert psutil.pid_exists(pid) and pid in job.pids()
    if leaves:
        assert job.wait() == 0
    else:
        job.deadline = time.monotonic() + 0.1
        assert job.wait() is None
    assert has_ended(pid) and job.pids() == []
    assert int(job.text()) == pid  # what was printed is kept


def test_a_job_of_a_job_ends_with_it():
    inner = "from hvd_adaptive.tools.processes import Job; Job({}, 600.0); import time; {}"
    code = inner.format(daemon(True), "time.sleep(600)")
    job = Job([sys.executable, "-c", code], 60.0)
    while len(job.pids()) < 2:
        assert time.monotonic() < job.deadline
        time.sleep(0.05)
    pids = job.pids()
    job.end()
    assert all(map(has_ended, pids))


def test_other_jobs_go_on():
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    first, second = Job(sleep, 60.0), Job(sleep, 60.0)
    first.end()
    assert first.process.poll() is not None and second.process.poll() is None
    second.end()


def test_a_command_that_hangs_after_a_failure_ends_early(monkeypatch):
    monkeypatch.setattr("hvd_adaptive.tools.processes.GRACE_S", 0.3)
    monkeypatch.setattr("hvd_adaptive.tools.processes.CHECK_S", 0.1)
    begin = time.monotonic()
    job = Job([sys.executable, "-c", "import time; time.sleep(600)"], 600.0)
    assert job.wait(lambda: True) is None
    assert time.monotonic() - begin < 60


def test_status_output_folder_and_environment(tmp_path):
    code = "import os, sys; print(os.getcwd(), os.environ['WORD']); print('err', file=sys.stderr)"
    job = Job(
        [sys.executable, "-c", f"{code}; sys.exit(3)"],
        60.0,
        environment={"WORD": "given"},
        folder=tmp_path,
        output=tmp_path / "log",
    )
    assert job.wait() == 3
    assert sorted(job.text().splitlines()) == sorted([f"{tmp_path} given", "err"])
    assert (tmp_path / "log").read_text() == job.text()


def test_a_deadline_that_passed_unseen_is_no_failure():
    job = Job([sys.executable, "-c", ""], 0.0)
    job.process.wait(60)
    assert job.wait() == 0 and GRACE_S > 0
