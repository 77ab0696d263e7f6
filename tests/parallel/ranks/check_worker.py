"""Steps with a worker: the same bits as without, whatever the delays at each hand-over."""

from __future__ import annotations

import random
import threading
import time

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, flat_parameters, make_model, train
from rank_optimizers import distributed

from hvd_adaptive import ALQ, ECDQ, QSGD, Hierarchical, Tuning, instances
from hvd_adaptive.run.arrivals import Arrivals
from hvd_adaptive.run.step import Step

STEPS = 3
CASES = {
    "allgather": lambda **k: ALQ(bits=3, exchange="allgather", **k),
    "scatter_reduce": lambda **k: ALQ(bits=3, exchange="scatter_reduce", **k),
    "hierarchical": lambda **k: ALQ(bits=3, exchange=Hierarchical(ranks_per_node=1), **k),
    "feedback": lambda **k: QSGD(bits=4, error_feedback=0.5, **k),
    "auto": lambda **k: QSGD(bits=2, error_feedback="auto", **k),
    "parts": lambda **k: ALQ(scope="tensor", exchange="scatter_reduce", **k),
    "ecdq": lambda **k: ECDQ(bits=2.0, **k),
}


def trained(case: str, worker: bool) -> torch.Tensor:
    instances.start_over()
    compressor = CASES[case](
        bucket_size=128, min_numel=10, fusion_bytes=2048, tuning=Tuning(worker=worker)
    )
    model = make_model(width=64)
    train(model, distributed(model, compressor), STEPS)
    return flat_parameters(model)


@pytest.fixture
def delays(monkeypatch):
    """Random delays wherever the worker and the program's thread meet."""
    numbers = random.Random(hvd.rank())

    def delayed(name: str, of: type = Step):
        method = getattr(of, name)

        def later(self, *arguments, **keywords):
            if numbers.random() < 0.4:
                time.sleep(0.003 * numbers.random())
            return method(self, *arguments, **keywords)

        monkeypatch.setattr(of, name, later)

    delayed("arrive", Arrivals)
    for name in ("advance", "_start", "_advance", "launch_all", "result"):
        delayed(name)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case, delays):
    without, found = trained(case, False), trained(case, True)
    assert torch.equal(found, without)
    assert_same_everywhere(found, f"worker.{case}")


def test_groups_leave_while_the_backward_pass_goes_on():
    """The last hook finds averages of earlier groups decoded already."""
    compressor = ALQ(
        bucket_size=128,
        min_numel=10,
        fusion_bytes=2048,
        tuning=Tuning(worker=True),
        update_steps=(0,),
    )
    model = make_model()
    optimizer = distributed(model, compressor)
    train(model, optimizer, 1)
    decoded = []

    def wait(gradient: torch.Tensor) -> None:
        step, end = compressor._training.connection.drive.step, time.monotonic() + 30
        while not step._returned and time.monotonic() < end:
            time.sleep(0.01)
        decoded.append(len(step._returned))

    first = next(iter(model.parameters()))
    handle = first.register_hook(wait)
    train(model, optimizer, 1)
    handle.remove()
    assert decoded[0] >= 1


def test_the_thread_ends_when_the_compressor_is_closed():
    compressor = ALQ(tuning=Tuning(worker=True))
    model = make_model()
    optimizer = distributed(model, compressor)
    train(model, optimizer, 2)
    thread = compressor._training.connection._driver._worker._thread
    assert thread in threading.enumerate()
    compressor.close()
    thread.join(30)
    assert not thread.is_alive()
    del optimizer
