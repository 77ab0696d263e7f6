"""tools/processes.py: a job ends with all that came of it, whatever these processes did to hide."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from hvd_adaptive.tools.processes import GRACE_S, Job

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
