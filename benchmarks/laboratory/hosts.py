"""Build hosts on one machine: network namespaces on a bridge, each link shaped at both ends.

All of it, the bridge included, lives in namespaces whose names begin with ``hvdlab-``: the
machine's own network is not touched, and removing those namespaces removes everything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import IO

PREFIX = "hvdlab-"  # bin/inside knows it, too
SWITCH = f"{PREFIX}switch"
INTERFACE = "lab0"
NETWORK = "10.213.77"
LOCK = Path("/run/hvdlab.lock")
FOLDER = Path("/run/hvdlab")  # what runs on the hosts writes here
INSIDE = Path(__file__).resolve().parent / "bin" / "inside"
# What hosts take, and Debian's packages that bring it.
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
FILES = Path("/etc/netns")  # `ip netns exec` lays FILES/NAME/hosts over /etc/hosts
MOST_HOSTS = 64
BURST, LATENCY = "512kb", "50ms"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class LaboratoryError(RuntimeError):
    """Say what is missing here for a laboratory."""


def bits_per_second(rate: str) -> float:
    """Parse a rate as ``tc`` writes it, "1gbit"; raise ValueError if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or not float(match[1]):
        raise ValueError(f"rate={rate!r}: must be a number above 0 and kbit, mbit or gbit: 1gbit")
    return float(match[1]) * UNITS[match[2]]


def missing() -> list[str]:
    """Return what this machine lacks for a laboratory, in words."""
    lacks = [] if os.geteuid() == 0 else ["root: network namespaces need it (run with sudo)"]
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            lacks.append(f"the program {program} (Debian: apt-get install {package})")
    return lacks


class Hosts:
    """Keep ``count`` hosts with one interface ``lab0`` each while the context is open.

    rate: of each link, both ways, as ``tc`` writes it. Names of hosts are their addresses. What an
    earlier laboratory left behind is removed first; leaving the context removes everything, and
    kills what runs on the hosts. LaboratoryError where it cannot be built, or another one is open.
    """

    def __init__(self, count: int, rate: str) -> None:
        if not 1 <= count <= MOST_HOSTS:
            raise ValueError(f"hosts={count}: must be from 1 to {MOST_HOSTS}")
        bits_per_second(rate)
        self.rate = rate
        self.addresses = [f"{NETWORK}.{i + 1}" for i in range(count)]
        self._lock: IO[str] | None = None

    def __enter__(self) -> Hosts:
        if lacks := missing():
            raise LaboratoryError(f"cannot build hosts without {'; '.join(lacks)}")
        self._lock = _locked()
        try:
            remove_all()
            self._build()
            _run(shlex.join(self.inside(self.addresses[0], ["true"])))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _unhurried():
            remove_all()
            if self._lock is not None:
                self._lock.close()

    def inside(self, address: str, command: list[str]) -> list[str]:
        """Return the command line that runs ``command`` on a host."""
        return [str(INSIDE), address, *command]

    def _build(self) -> None:
        FOLDER.mkdir(mode=0o700)
        _run(f"ip netns add {SWITCH}")
        _run(f"ip -n {SWITCH} link add bridge0 type bridge")
        _run(f"ip -n {SWITCH} link set bridge0 up")
        shape = _shape(self.rate)
        for port, address in enumerate(self.addresses):
            host = PREFIX + address
            _run(f"ip netns add {host}")
            _write_hosts_file(host, address)
            _run(f"ip -n {host} link set lo up")
            _run(f"ip -n {host} link add {INTERFACE} type veth peer name port{port} netns {SWITCH}")
            _run(f"ip -n {SWITCH} link set port{port} master bridge0 up")
            _run(f"ip -n {host} address add {address}/24 dev {INTERFACE}")
            _run(f"ip -n {host} link set {INTERFACE} up")
            _run(f"tc -n {host} qdisc add dev {INTERFACE} {shape}")
            _run(f"tc -n {SWITCH} qdisc add dev port{port} {shape}")


def remove_all() -> None:
    """Remove every host, the switch and FOLDER, if there are any, and kill what runs there."""
    for name in _namespaces():
        _kill_inside(name)
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
    for folder in [FOLDER, *FILES.glob(f"{PREFIX}*")]:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        FILES.rmdir()  # where nobody else has files there


def _write_hosts_file(name: str, address: str) -> None:
    """Name the host by its own address (bin/inside): Horovod's Gloo looks the name up for process
    sets, whatever its interface is."""
    folder = FILES / name
    folder.mkdir(parents=True, exist_ok=True)
    text = f"127.0.0.1 localhost\n{address} {PREFIX}{address.replace('.', '-')}\n"
    (folder / "hosts").write_text(text, encoding="utf-8")


def _shape(rate: str) -> str:
    """Return the shape of one end of a link, as ``tc`` takes it."""
    return f"root tbf rate {rate} burst {BURST} latency {LATENCY}"


def _namespaces() -> list[str]:
    """Return the names of this program's namespaces."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    return [name for name in names if name.startswith(PREFIX)]


def _kill_inside(name: str) -> None:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        found = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        )
        pids = found.stdout.split()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def _run(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaboratoryError(
            f"{command!r} failed: {done.stderr.strip() or done.returncode}; the kernel must allow "
            "namespaces (network, name, mounts), veth, bridge and tbf (containers often do not)"
        )


def _locked() -> IO[str]:
    """Return the lock file, held; raise LaboratoryError if another process holds it."""
    file = LOCK.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise LaboratoryError(f"another laboratory is open (process {owner})") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


@contextlib.contextmanager
def _unhurried():
    """Hold Ctrl-C and SIGTERM back, so that a second one does not interrupt cleaning up."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
