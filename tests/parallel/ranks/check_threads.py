"""Hooks that fire in several threads."""

from __future__ import annotations

import threading

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
)

pytestmark = pytest.mark.gloo
THREADS = 4


def together(tasks) -> None:
    """Run all, each in a thread of its own; the first error is raised here."""
    errors, start = [], threading.Barrier(len(tasks))

    def run(task) -> None:
        try:
            start.wait()
            task()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


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
