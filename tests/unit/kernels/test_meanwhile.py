"""While a kernel is compiled, training runs its reference; nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from test_host_cache import FakeDispatcher, anew, held  # noqa: F401

from hvd_adaptive import kernels
from hvd_adaptive.kernels import meanwhile
from hvd_adaptive.kernels.meanwhile import or_reference
from hvd_adaptive.kernels.numba import host_cache
from hvd_adaptive.kernels.numba.host_cache import once_a_host
from hvd_adaptive.variables import WAIT

LIMIT = 20.0

# A training run of one process with an empty cache: what each call returned, and who computed it.
PROGRAM = """
import json, os, sys, torch
from hvd_adaptive import ALQ
from hvd_adaptive.kernels import meanwhile
from hvd_adaptive.kernels.numba.host_cache import _compiler
from hvd_adaptive.kernels.reference import tables as reference
if sys.argv[1] == "training":
    meanwhile.allow()
calls, slow = [], reference.quantize
def quantize(*arguments):
    calls.append("reference")
    return slow(*arguments)
reference.quantize = quantize
flat = torch.linspace(-1, 1, 10_000) ** 3
found, codec = [], ALQ(bits=3, seed=1).codec
def once():
    payload = codec.encode_payload(flat, flat.numel(), 5).bytes
    found.append([payload.tolist(), codec.squared_errors(flat, 5).tolist()])
once()
first = len(calls)
if sys.argv[1] == "training":
    for _ in range(3):
        _compiler(os.getpid()).submit(lambda: None).result()
        once()
    calls.clear()
once()
print(json.dumps([first, len(calls), found[0] == found[-1], found[-1]]))
"""


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setattr(meanwhile, "_allowed", [True])
    monkeypatch.setattr(host_cache, "_background", host_cache._Background())


def replaceable(dispatcher):
    def checksums():  # as the reference has it
        return dispatcher.compile("f")

    return or_reference("checksum")(checksums)


@pytest.fixture(autouse=True)
def references(monkeypatch):
    monkeypatch.setattr(kernels.module("reference", "checksum"), "checksums", lambda: "reference")


def until(true):
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_training_uses_the_reference_until_the_kernel_is_there(tmp_path, allowed):
    dispatcher = once_a_host(FakeDispatcher(tmp_path, {}))
    call = replaceable(dispatcher)
    assert call() == "reference"
    until(lambda: dispatcher.compiled)
    until(lambda: call() == "code")
    assert dispatcher.compiled == 1


def test_a_kernel_that_can_be_loaded_is_not_replaced(tmp_path, allowed):
    dispatcher = once_a_host(FakeDispatcher(tmp_path, {"f": "loaded"}))
    assert replaceable(dispatcher)() == "loaded" and not dispatcher.compiled


def test_what_another_process_compiles_is_loaded_when_it_is_there(tmp_path, allowed):
    saved, file = {}, held(tmp_path)
    dispatcher = once_a_host(FakeDispatcher(tmp_path, saved))
    call = replaceable(dispatcher)
    assert [call() for _ in range(3)] == ["reference"] * 3
    saved["f"] = "loaded"
    file.close()
    until(lambda: call() == "loaded")
    assert not dispatcher.compiled


def test_a_kernel_that_cannot_be_compiled_raises_its_error(tmp_path, allowed):
    call = replaceable(once_a_host(FakeDispatcher(tmp_path, {}, fails=True)))
    assert call() == "reference"

    def fails():
        try:
            return call() != "reference"
        except RuntimeError as error:
            return "cannot compile" in str(error)

    until(fails)


def test_calls_without_a_reference_wait(tmp_path, allowed):
    assert once_a_host(FakeDispatcher(tmp_path, {})).compile("f") == "code"


def test_another_thread_that_compiles_is_not_waited_for(tmp_path, allowed):
    """Numba compiles and loads one kernel at a time."""
    dispatcher = once_a_host(FakeDispatcher(tmp_path, {"f": "loaded"}))
    entered, leave = threading.Event(), threading.Event()

    def compile_something():
        with host_cache._one_at_a_time:
            entered.set()
            leave.wait(LIMIT)

    thread = threading.Thread(target=compile_something)
    thread.start()
    entered.wait(LIMIT)
    call = replaceable(dispatcher)
    assert call() == "reference"
    leave.set()
    thread.join()
    until(lambda: call() == "loaded")


def test_what_measures_waits(tmp_path, allowed):
    """``exchange="auto"`` compares seconds with fast kernels."""
    with meanwhile.waiting():
        assert replaceable(once_a_host(FakeDispatcher(tmp_path, {})))() == "code"


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    """It may live long, as a worker of a DataLoader does."""
    with host_cache._turn(tmp_path / "kernel-1.lock"):
        child = os.fork()
        if child == 0:
            time.sleep(LIMIT)
            os._exit(0)
    try:
        with (tmp_path / "kernel-1.lock").open("a") as file:
            assert host_cache._taken(file)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_forked_process_begins_anew(allowed):
    with host_cache._one_at_a_time:
        host_cache._background._asked.add((1, "f"))
        child = os.fork()
        if child == 0:
            os._exit(bool(host_cache._background._asked))
        assert os.waitpid(child, 0)[1] == 0


def test_nothing_is_replaced_outside_training(tmp_path, monkeypatch):
    monkeypatch.setattr(meanwhile, "_allowed", [])
    assert replaceable(once_a_host(FakeDispatcher(tmp_path, {})))() == "code"


def test_training_waits_if_the_environment_says_so(monkeypatch):
    monkeypatch.setattr(meanwhile, "_allowed", [])
    monkeypatch.setenv(WAIT, "1")
    meanwhile.allow()
    assert not meanwhile._allowed
    monkeypatch.delenv(WAIT)
    meanwhile.allow()
    assert meanwhile._allowed


def run(mode, folder):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), WAIT: ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_both_backends_compute_the_same_payload(tmp_path):
    first, last, same, found = run("training", tmp_path / "one")
    assert first > 0, "the cache was empty"
    assert last == 0, "then kernels are there"
    assert same
    first, last, same, alone = run("tests", tmp_path / "two")
    assert first == last == 0 and same and alone == found
