"""Kernels are compiled by one process of a host; the others wait and load."""

from __future__ import annotations

import fcntl
import inspect
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from hvd_adaptive.kernels.numba import jit
from hvd_adaptive.kernels.numba.eden import encoder_of
from hvd_adaptive.kernels.numba.eden_decoder import decoder_of
from hvd_adaptive.kernels.numba.jit import once_a_host

# Kernels as a rank needs them first; what this process has compiled, and imported for that.
PROGRAM = """
import sys
from hvd_adaptive.kernels.numba import scan
from numba.core import event
import numpy as np
class Compiled(event.Listener):
    found = 0
    def on_start(self, e): self.found += e.data["dispatcher"] is scan.histogram
    def on_end(self, e): pass
listener = Compiled()
event.register("numba:compile", listener)
scan.histogram(np.ones(5, np.float32), np.float32(1))
print(listener.found, "numba.np.linalg" in sys.modules)
"""


def test_processes_that_start_together_compile_each_kernel_once(tmp_path):
    """What compiled it has imported what compilations need."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, "-c", PROGRAM]
    started = [
        subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    found = [one.communicate(timeout=120)[0] for one in started]
    assert sorted(words.split()[0] for words in found) == ["0", "1"]
    assert "1 True\n" in found


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX's")
def test_cached_kernels_run_without_what_compilations_need():
    """Numba's registries import scipy.linalg and more, which takes longer than a first step. On a
    terminal, which ranks under mpirun have, too, kernels write no escapes of colour."""
    program = (
        "import sys, torch; from hvd_adaptive import QSGD;"
        "flat = torch.linspace(-1, 1, 1000); scheme = QSGD(bits=4);"
        "scheme.decode(scheme.encode(flat, seed=1));"
        "print('numba.np.linalg' in sys.modules)"
    )
    exec(program, {})  # compiles what set-up has not
    ours, theirs = os.openpty()
    try:
        subprocess.run([sys.executable, "-c", program], stdout=theirs, check=True, timeout=120)
        assert os.read(ours, 1000).split() == [b"False"]
    finally:
        os.close(ours)
        os.close(theirs)


class FakeDispatcher:
    """Of one kernel, with a cache in a folder; ``saved`` is what all processes see."""

    def __init__(self, folder, saved, fails=False):
        self._cache = SimpleNamespace(
            cache_path=str(folder),
            _impl=SimpleNamespace(filename_base="kernel-1"),
            load_overload=lambda signature, target: saved.get(signature),
            save_overload=saved.__setitem__,
        )
        self.fails, self.compiled = fails, 0

    def compile(self, signature):
        found = self._cache.load_overload(signature, None)
        if found is not None:
            return found
        if self.fails:
            raise RuntimeError("cannot compile")
        self.compiled += 1
        time.sleep(0.1)
        self._cache.save_overload(signature, "code")
        return "code"


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    for name in jit.LOCAL_RANK:
        monkeypatch.delenv(name, raising=False)
    jit._voice.cache_clear()


def warn_in_child(caplog):
    before = len(caplog.messages)
    jit.warn_uncached("nowhere")
    sys.exit(len(caplog.messages) - before)


def held(folder):
    """As another process holds the lock: a lock belongs to an open file."""
    file = (folder / "kernel-1.lock").open("a")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def test_a_failed_compilation_releases_the_lock(tmp_path):
    broken = once_a_host(FakeDispatcher(tmp_path, {}, fails=True))
    with pytest.raises(RuntimeError, match="cannot compile"):
        broken.compile("f")
    assert once_a_host(FakeDispatcher(tmp_path, {})).compile("f") == "code"


def test_a_waiting_process_loads_what_the_other_one_compiles(tmp_path):
    """Another signature of a kernel that it has compiled itself, too."""
    saved = {}
    waiting = once_a_host(FakeDispatcher(tmp_path, saved))
    assert waiting.compile("e") == "code"
    file = held(tmp_path)

    def compiled_elsewhere():
        time.sleep(0.1)
        saved["f"] = "loaded"
        file.close()

    thread = threading.Thread(target=compiled_elsewhere)
    thread.start()
    assert waiting.compile("f") == "loaded" and waiting.compiled == 1
    thread.join()


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    """It may live long, as a worker of a DataLoader does."""
    with jit._turn(tmp_path / "kernel-1.lock"):
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
    try:
        with (tmp_path / "kernel-1.lock").open("a") as file:
            assert jit._taken(file)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_forked_process_can_compile_while_a_thread_of_its_parent_does(tmp_path):
    entered, leave = threading.Event(), threading.Event()

    def compile_something():
        with jit._one_at_a_time:
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=compile_something)
    thread.start()
    entered.wait(20)
    child = os.fork()
    if child == 0:
        os._exit(0 if once_a_host(FakeDispatcher(tmp_path, {})).compile("f") == "code" else 1)
    assert os.waitpid(child, 0)[1] == 0
    leave.set()
    thread.join()


def test_nobody_waits_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(jit, "LONGEST", 0.05)
    with held(tmp_path):
        assert once_a_host(FakeDispatcher(tmp_path, {})).compile("f") == "code"


def test_compilations_are_announced_once_a_host(tmp_path, monkeypatch, caplog):
    """What is loaded is not announced, and other ranks of the host say nothing."""
    assert once_a_host(FakeDispatcher(tmp_path, {"f": "loaded"})).compile("f") == "loaded"
    assert not caplog.messages
    for _ in range(2):
        once_a_host(FakeDispatcher(tmp_path, {})).compile("f")
    (message,) = caplog.messages
    assert str(tmp_path) in message and "NUMBA_CACHE_DIR" in message
    child = multiprocessing.get_context("fork").Process(target=warn_in_child, args=(caplog,))
    child.start()
    child.join()
    assert child.exitcode == 0, "a child of the process has warned"
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    jit._voice.cache_clear()
    once_a_host(FakeDispatcher(tmp_path, {})).compile("f")
    jit.warn_uncached("nowhere")
    assert caplog.messages == [message]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    def save(signature, data):
        raise OSError("No space left on device")

    dispatcher = FakeDispatcher(tmp_path / "missing" / "deep", {})
    (tmp_path / "missing").write_text("no folder")
    dispatcher._cache.save_overload = save
    assert once_a_host(dispatcher).compile("f") == "code"
    jit.warn_uncached("again")
    _, message = caplog.messages  # the first one says that it compiles
    assert "NUMBA_CACHE_DIR" in message and "No space left" in message


def test_kernels_refer_to_nothing_that_differs_between_processes():
    """Numba finds a kernel in its cache by the values that its closure refers to. A function among
    them is another object in each process, which compiles the kernel again."""
    for bits in range(1, 9):
        for kernel in (decoder_of(bits), encoder_of(bits)):
            cells = inspect.getclosurevars(kernel.py_func).nonlocals
            assert all(isinstance(value, int) for value in cells.values()), cells
