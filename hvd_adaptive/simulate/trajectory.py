"""Measure every scheme's variance on the same trajectory, as in Fig. 5 of the ALQ paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hvd_adaptive.base.checks import check_integer
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.simulate import training
from hvd_adaptive.simulate.data import Batches, Minibatch
from hvd_adaptive.simulate.ranks import Ranks
from hvd_adaptive.simulate.records import Records, Row


def variance_on_trajectory(
    model: torch.nn.Module,
    data: Minibatch | Batches,
    schemes: Mapping[str, GradientCompressor],
    *,
    optimizer: training.MakeOptimizer,
    steps: Collection[int],
    workers: int = 4,
    batch_size: int | None = None,
    seed: int = 0,
    loss: training.Loss = F.cross_entropy,
    schedule: training.MakeSchedule | None = None,
    progress: bool | None = None,
) -> Records:
    """Train ``model`` by plain float32 SGD of one rank, and measure variances at ``steps``.

    At these steps, and at steps when a scheme's table is due, ``workers`` minibatch gradients are
    computed at the model's parameters. SGD uses the first of them. Each scheme refits its table to
    them by its own schedule. Its variance is computed from the table and the gradients (ALQ Eq. 1),
    without random draws; only schemes without a level table need draws.

    Args:
        model: The model, trained in place.
        data: As in ``train``.
        schemes: Compressors by the name of their rows.
        optimizer: As in ``train``.
        steps: Steps at which to measure, >= 0.
        workers: Number of minibatch gradients, >= 2.
        batch_size: As in ``train``.
        seed: As in ``train``.
        loss: As in ``train``.
        schedule: As in ``train``.
        progress: As in ``train``.

    Returns:
        Records with the columns step, method, and those of ``ranks.Variance``. The first two
        methods quantise nothing: "SGD" of one rank and "SuperSGD", the average of ``workers`` in
        float32.

    Examples:
        >>> from hvd_adaptive import ALQ, simulate
        >>> records = simulate.variance_on_trajectory(
        ...     torch.nn.Linear(64, 10),
        ...     (torch.randn(400, 64), torch.randint(10, (400,))),
        ...     {"ALQ": ALQ(bits=3, min_numel=1)},
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ...     batch_size=8,
        ...     steps=[0, 5],
        ... )
    """
    check_integer("workers", workers, 2)
    wanted = {check_integer("steps", step, 0) for step in steps}
    trainer = training.Trainer(model, data, optimizer, schedule, loss, workers, batch_size, seed)
    named = list(model.named_parameters())
    exact = Ranks(named, None, workers)
    ranks = {name: Ranks(named, scheme, workers) for name, scheme in schemes.items()}
    takers = _share([exact, *ranks.values()])
    described = {"schemes": {name: repr(scheme) for name, scheme in schemes.items()}}
    records = Records(trainer.settings | described, [])

    hidden = None if progress is None else not progress
    every = range(max(wanted, default=-1) + 1)
    for step in tqdm(every, unit="step", leave=False, disable=hidden):
        due = [each for each in ranks.values() if each.due(step)]
        measured = step in wanted
        count = workers if due or measured else 1
        trainer.backward(step, takers, count)
        for each in due:
            each.refit(step)
        if measured:
            records.rows += _rows(step, exact, ranks)
        exact.restore(0)
        trainer.step()
    return records


def _share(all_ranks: list[Ranks]) -> list[Ranks]:
    """Let ranks with equal layouts share buffers; return the ranks whose buffers must be filled."""
    first: dict[int, Ranks] = {}
    for ranks in all_ranks:
        ranks.flats[:] = first.setdefault(ranks.layout.fingerprint, ranks).flats
    return list(first.values())


def _rows(step: int, exact: Ranks, ranks: Mapping[str, Ranks]) -> list[Row]:
    average = exact.variance(step)
    alone = dataclasses.replace(average, estimator=average.minibatch)
    figures = {"SGD": alone, "SuperSGD": average}
    figures |= {name: each.variance(step) for name, each in ranks.items()}
    return [
        {"step": step, "method": name, **dataclasses.asdict(variance)}
        for name, variance in figures.items()
    ]
