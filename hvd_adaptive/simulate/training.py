"""Simulate data-parallel training of M ranks in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hvd_adaptive._version import __version__
from hvd_adaptive.base.checks import check_integer
from hvd_adaptive.changes import begin_step
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.monitor.log import new_tables
from hvd_adaptive.simulate.data import Batches, Minibatch, make_batches
from hvd_adaptive.simulate.ranks import Ranks, Variance
from hvd_adaptive.simulate.records import Records, described

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MakeSchedule = Callable[[torch.optim.Optimizer], Any]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
COLUMNS = (
    "step",
    "loss",
    "learning_rate",
    "bits_per_coordinate",
    "relative_error",
    "table_version",
    "validation_loss",
    "validation_accuracy",
    *(field.name for field in dataclasses.fields(Variance)),
)


class Result(Records):
    """Result of a simulated run.

    ``rows`` has one row per step; a value is None if it was not measured. The columns are step,
    loss (mean over the ranks), learning_rate, bits_per_coordinate (of a payload, including headers
    and norms), relative_error (||average - exact||**2 / ||exact||**2 of this step's averaged
    gradient), table_version, validation_loss and validation_accuracy (after the step), and those of
    ``ranks.Variance`` (before the step).
    """

    @property
    def tables(self) -> list[dict[str, Any]]:
        """Return the successive level tables, {"step", "part", "version", "levels"}, which are
        among the settings; step is -1 for tables that existed at the start.
        """
        return self.settings.setdefault("tables", [])

    def note_table(self, compressor: GradientCompressor | None, step: int) -> None:
        """Append the compressor's new tables; schemes without tables have none."""
        parts = {} if compressor is None else compressor.parts
        known = {table["part"]: table["version"] for table in self.tables}
        self.tables.extend({"step": step} | table for table in new_tables(parts, known))


def train(
    model: torch.nn.Module,
    data: Minibatch | Batches,
    *,
    optimizer: MakeOptimizer,
    compressor: GradientCompressor | None = None,
    workers: int = 4,
    steps: int,
    batch_size: int | None = None,
    seed: int = 0,
    loss: Loss = F.cross_entropy,
    schedule: MakeSchedule | None = None,
    validation: Minibatch | None = None,
    evaluate_every: int = 0,
    variance_steps: Collection[int] = (),
    progress: bool | None = None,
) -> Result:
    """Train ``model`` (in place) as ``workers`` ranks would, each with its own minibatches.

    Each rank has its own buffers (batch normalisation), as under Horovod; the model is evaluated
    with rank 0's buffers and keeps them. Random layers draw from torch's global generator, rank
    after rank.

    Args:
        model: The model.
        data: (inputs, targets), from which every rank draws ``batch_size`` examples per step in an
            order that depends on ``seed`` only; or a callable (rank, step) -> (inputs, targets).
        optimizer: Callable that makes an optimizer from parameters.
        compressor: Any scheme; its own ``seed`` determines the rounding. None averages in float32,
            which is SuperSGD, or plain SGD if workers=1. Unlike under Horovod, a single rank is
            also compressed. Steps are counted from ``compressor.step``.
        workers: Number of ranks, >= 1.
        steps: Number of steps, >= 1.
        batch_size: Examples per rank and step; only if ``data`` is a pair of tensors.
        seed: Seed of the order of examples.
        loss: Callable (scores, targets) -> loss.
        schedule: Callable that makes a learning rate scheduler from the optimizer; it steps once
            per training step.
        validation: (inputs, targets), evaluated in eval mode after every ``evaluate_every`` steps
            and at the end.
        evaluate_every: Steps between evaluations; 0 evaluates only at the end.
        variance_steps: Steps at which the gradients' variance is measured.
        progress: Whether to show a progress bar on stderr; None shows it if stderr is a terminal.

    Returns:
        The Result; see its columns.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> from hvd_adaptive import ALQ, simulate
        >>> result = simulate.train(
        ...     torch.nn.Linear(64, 10),
        ...     (torch.randn(400, 64), torch.randint(10, (400,))),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ...     compressor=ALQ(bits=3, min_numel=1),
        ...     batch_size=8,
        ...     steps=10,
        ... )
        >>> len(result.rows)
        10
    """
    steps = check_integer("steps", steps, 1)
    evaluate_every = check_integer("evaluate_every", evaluate_every, 0)
    ranks = Ranks(model.named_parameters(), compressor, workers)
    batches = make_batches(data, batch_size, ranks.workers, seed)
    stepper = optimizer(model.parameters())
    scheduler = schedule(stepper) if schedule is not None else None
    buffers = Buffers(model, ranks.workers)
    first = compressor.step if compressor is not None else 0
    settings = described_run(model, stepper, batches, ranks, seed, batch_size) | {
        "schedule": described(schedule),
        "loss": described(loss),
        "compressor": None if compressor is None else repr(compressor),
        "steps": steps,
    }
    result = Result(settings, [])
    result.note_table(compressor, -1)

    model.train()
    hidden = None if progress is None else not progress
    with tqdm(total=steps, unit="step", leave=False, disable=hidden) as bar:
        for step in range(first, first + steps):
            row = dict.fromkeys(COLUMNS) | {"step": step}
            if compressor is not None and begin_step(compressor):
                ranks = ranks.renewed()
            row["learning_rate"] = stepper.param_groups[0]["lr"]
            row["loss"] = backward(model, batches, step, loss, buffers, [ranks], ranks.workers)
            if ranks.due(step):
                ranks.refit(step)
            result.note_table(compressor, step)
            if step in variance_steps:
                row.update(dataclasses.asdict(ranks.variance(step)))
            ranks.average(step)
            stepper.step()
            if scheduler is not None:
                scheduler.step()
            if compressor is not None:
                compressor.step = step + 1
                row["table_version"] = compressor.report()["table_version"]
            row["bits_per_coordinate"] = 8 * ranks.payload_bytes / ranks.coordinates
            row["relative_error"] = ranks.relative_error
            done = step + 1 - first
            due = done == steps or (evaluate_every and done % evaluate_every == 0)
            if validation is not None and due:
                figures = evaluate(model, *validation, loss)
                row["validation_loss"], row["validation_accuracy"] = figures
                bar.set_postfix(loss=f"{row['loss']:.3f}", accuracy=figures[1])
            result.rows.append(row)
            bar.update()
    return result


def backward(
    model: torch.nn.Module,
    batches: Batches,
    step: int,
    loss: Loss,
    buffers: Buffers,
    takers: Collection[Ranks],
    workers: int,
) -> float:
    """Compute every rank's gradient, pass it to ``takers``, and return the mean loss."""
    total = 0.0
    for rank in range(workers):
        inputs, targets = batches(rank, step)
        buffers.load(rank)
        model.zero_grad(set_to_none=True)
        value = loss(model(inputs), targets)
        value.backward()
        buffers.store(rank)
        for ranks in takers:
            ranks.take(rank)
        total += float(value.detach())
    buffers.load(0)
    return total / workers


def evaluate(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss: Loss = F.cross_entropy,
    batch_size: int = 500,
) -> tuple[float, float | None]:
    """Return mean loss and accuracy in eval mode; accuracy is None unless targets are classes."""
    was_training = model.training
    model.eval()
    total, right, classes = 0.0, 0, not targets.is_floating_point()
    with torch.no_grad():
        for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
            scores = model(x)
            total += float(loss(scores, y)) * len(x)
            right += int((scores.argmax(1) == y).sum()) if classes else 0
    model.train(was_training)
    return total / len(inputs), right / len(inputs) if classes else None


def described_run(
    model: torch.nn.Module,
    stepper: torch.optim.Optimizer,
    batches: Batches,
    ranks: Ranks,
    seed: int,
    batch_size: int | None,
) -> dict[str, Any]:
    """Return the settings that every record contains, in a form for JSON."""
    return {
        "version": __version__,
        "torch": torch.__version__,
        "model": type(model).__name__,
        "parameters": ranks.coordinates,
        "optimizer": type(stepper).__name__,
        "optimizer_settings": described(stepper.defaults),
        "data": described(batches),
        "workers": ranks.workers,
        "batch_size": batch_size,
        "seed": seed,
    }


class Buffers:
    """Copies of the model's buffers for each rank."""

    def __init__(self, model: torch.nn.Module, workers: int) -> None:
        self._live = list(model.buffers())
        self._copies = [[b.clone() for b in self._live] for _ in range(workers)]

    def load(self, rank: int) -> None:
        """Copy a rank's buffers into the model."""
        for live, own in zip(self._live, self._copies[rank], strict=True):
            live.copy_(own)

    def store(self, rank: int) -> None:
        """Copy the model's buffers to those of a rank."""
        for live, own in zip(self._live, self._copies[rank], strict=True):
            own.copy_(live)
