"""Hooks that fire in several threads; when groups leave, with a worker and without."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from training import (
    assert_average,
    assert_same_everywhere,
    distributed,
    every_scheme,
    make,
    make_model,
    train,
    trained,
    wait_for,
)

from hvd_adaptive import ALQ, Tuning

pytestmark = pytest.mark.gloo
THREADS = 4


def together(tasks) -> None:
    """Run all, each in a thread of its own; the first error is raised here."""
    start = threading.Barrier(len(tasks))

    def run(task) -> None:
        start.wait()
        task()

    with ThreadPoolExecutor(len(tasks)) as threads:
        list(threads.map(run, tasks))


@every_scheme
def test_one_models_backward_passes_side_by_side(scheme):
    """Each thread has parameters of its own, in an order of its own: their hooks meet."""
    names = [f"layer{i}" for i in range(4 * THREADS)]
    model = {name: torch.nn.Parameter(torch.zeros(192)) for name in names}
    optimizer = distributed(model, make(scheme, fusion_bytes=4 * 400), lr=1.0)

    def task(thread: int, step: int):
        def backward() -> None:
            order = np.random.default_rng([thread, step, hvd.rank()]).permutation(4)
            for number in (4 * thread + order).tolist():
                (model[names[number]].sum() * (number + 1) * (hvd.rank() + 1)).backward()

        return backward

    for step in range(4):
        optimizer.zero_grad()
        together([task(thread, step) for thread in range(THREADS)])
        optimizer.step()
        for number, name in enumerate(names):
            assert_average(model[name].grad, (number + 1) * (hvd.size() + 1) / 2)


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
def test_two_models_trained_side_by_side(exchange):
    """Each by its own thread, with its own optimizer and compressor; both fit tables."""
    models = [make_model(seed, width=60) for seed in (1, 2)]
    compressors = [make("alq", seed=seed, exchange=exchange, samples=3) for seed in (1, 2)]
    optimizers = [
        distributed(model, compressor, prefix=f"net{i}.")
        for i, (model, compressor) in enumerate(zip(models, compressors, strict=True))
    ]
    together([lambda i=i: train(models[i], optimizers[i], 6, seed=i) for i in range(2)])
    assert_same_everywhere(*models)
    assert all(compressor.parts.default.table_version >= 1 for compressor in compressors)


def test_groups_leave_while_the_backward_pass_goes_on():
    """The last hook finds averages of earlier groups decoded already."""
    compressor = ALQ(
        tuning=Tuning(worker=True),
        update_steps=(0,),
        bucket_size=128,
        min_numel=10,
        fusion_bytes=2048,
    )
    decoded = []
    model, optimizer = trained(compressor, 1)

    def wait(gradient: torch.Tensor) -> None:
        step = compressor._training.connection.drive.step
        wait_for(lambda: step._returned)
        decoded.append(len(step._returned))

    next(iter(model.parameters())).register_hook(wait)
    train(model, optimizer, 1)
    assert decoded[0] >= 1


def test_groups_are_launched_in_hooks_without_a_worker():
    """The agreement costs no overlap beyond the first gradient."""
    weights = [torch.nn.Parameter(torch.zeros(2000)) for _ in range(3)]
    compressor = ALQ(
        update_steps=[], bucket_size=100, fusion_bytes=8000, tuning=Tuning(worker=False)
    )
    optimizer = distributed({f"roll.{i}": w for i, w in enumerate(weights)}, compressor)
    weights[2].sum().backward()
    drive = compressor._training.connection.drive
    wait_for(lambda: drive.read.active)  # on a worker thread, as ranks agree for the first time
    step = drive.step
    weights[1].sum().backward()
    assert len(step._flying) == 2
    weights[0].sum().backward()
    assert len(step._flying) == len(step.layout.groups)
    optimizer.step()
