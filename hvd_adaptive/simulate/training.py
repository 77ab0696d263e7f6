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
    trainer = Trainer(model, data, optimizer, schedule, loss, workers, batch_size, seed)
    first = compressor.step if compressor is not None else 0
    settings = {
        "schedule": described(schedule),
        "loss": described(loss),
        "compressor": None if compressor is None else repr(compressor),
        "steps": steps,
    }
    result = Result(trainer.settings | settings, [])
    result.note_table(compressor, -1)

    hidden = None if progress is None else not progress
    with tqdm(total=steps, unit="step", leave=False, disable=hidden) as bar:
        for step in range(first, first + steps):
            row = dict.fromkeys(COLUMNS) | {"step": step}
            if compressor is not None and begin_step(compressor):
                ranks = ranks.renewed()
            row["learning_rate"] = trainer.optimizer.param_groups[0]["lr"]
            row["loss"] = trainer.backward(step, [ranks], workers)
            if ranks.due(step):
                ranks.refit(step)
            result.note_table(compressor, step)
            if step in variance_steps:
                row.update(dataclasses.asdict(ranks.variance(step)))
            ranks.average(step)
            trainer.step()
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


class Trainer:
    """A model in training mode, its optimizer, examples, and a copy of its buffers for each rank.

    Attributes:
        settings: What every record contains, in a form for JSON.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data: Minibatch | Batches,
        optimizer: MakeOptimizer,
        schedule: MakeSchedule | None,
        loss: Loss,
        workers: int,
        batch_size: int | None,
        seed: int,
    ) -> None:
        self._model, self._loss = model.train(), loss
        self._batches = make_batches(data, batch_size, workers, seed)
        self.optimizer = optimizer(model.parameters())
        self._scheduler = None if schedule is None else schedule(self.optimizer)
        self._buffers = [[b.clone() for b in model.buffers()] for _ in range(workers)]
        self.settings = {
            "version": __version__,
            "torch": torch.__version__,
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "optimizer": type(self.optimizer).__name__,
            "optimizer_settings": described(self.optimizer.defaults),
            "data": described(self._batches),
            "workers": workers,
            "batch_size": batch_size,
            "seed": seed,
        }

    def backward(self, step: int, takers: Collection[Ranks], workers: int) -> float:
        """Compute every rank's gradient, pass it to ``takers``, and return the mean loss."""
        total = 0.0
        for rank in range(workers):
            inputs, targets = self._batches(rank, step)
            self._copy(self._buffers[rank], self._model.buffers())
            self._model.zero_grad(set_to_none=True)
            value = self._loss(self._model(inputs), targets)
            value.backward()
            self._copy(self._model.buffers(), self._buffers[rank])
            for ranks in takers:
                ranks.take(rank)
            total += float(value.detach())
        self._copy(self._buffers[0], self._model.buffers())
        return total / workers

    def step(self) -> None:
        """Step the optimizer, and the schedule."""
        self.optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()

    def _copy(self, source: Iterable[torch.Tensor], target: Iterable[torch.Tensor]) -> None:
        for one, other in zip(source, target, strict=True):
            other.copy_(one)
