"""Data-parallel training of M ranks in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hvd_adaptive._version import __version__
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.settings import check_integer
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


@dataclass
class Result(Records):
    """A simulated run. Columns of ``rows``, one row a step, None where nothing was measured:

    step, loss (mean over the ranks), learning_rate, bits_per_coordinate (of a payload, headers and
    norms included), relative_error (||average - exact||**2 / ||exact||**2 of this step's averaged
    gradient), table_version, validation_loss, validation_accuracy (after the step), and those of
    ranks.Variance (before it).

    tables: the level tables in turn, {"step", "part", "version", "levels"}; step is -1 for those
    that were there from the start.
    """

    tables: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def note_table(self, compressor: GradientCompressor | None, step: int) -> None:
        """Add the compressor's tables that are new; schemes without tables have none."""
        for part, codec in ({} if compressor is None else compressor.parts).items():
            levels, version = getattr(codec, "levels", None), codec.table_version
            known = [table["version"] for table in self.tables if table["part"] == part]
            if levels is not None and version not in known:
                table = {"step": step, "part": part, "version": version, "levels": levels.tolist()}
                self.tables.append(table)

    def write(self, path: Any) -> None:
        """As Records.write; the tables are among the settings."""
        Records(self.settings | {"tables": self.tables}, self.rows).write(path)

    @classmethod
    def read(cls, path: Any) -> Result:
        read = Records.read(path)
        tables = read.settings.pop("tables")
        return cls(read.settings, read.rows, tables)


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

    data: (inputs, targets), from which every rank draws ``batch_size`` examples a step in an order
        that ``seed`` alone decides; or a callable (rank, step) -> (inputs, targets).
    optimizer: makes one from parameters. schedule: makes a learning rate scheduler from it, which
        steps once a step.
    compressor: any scheme; its own ``seed`` names the rounding. None averages in float32: SuperSGD,
        and with workers=1 plain SGD. Unlike under Horovod, a single rank is compressed, too. Steps
        are counted on from ``compressor.step``.
    validation: (inputs, targets), evaluated after every ``evaluate_every`` steps (0: never) and at
        the end, in eval mode.
    variance_steps: steps at which the gradients' variance is measured.
    progress: a bar on stderr; None where that is a terminal.

    Buffers (batch normalisation): each rank has its own, as under Horovod; the model is evaluated
    and left with rank 0's. Random layers draw from torch's global generator, rank after rank.
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
    bar = tqdm(
        total=steps, unit="step", leave=False, disable=None if progress is None else not progress
    )
    with bar:
        for step in range(first, first + steps):
            row = dict.fromkeys(COLUMNS) | {"step": step}
            if compressor is not None and compressor.begin_step():
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
    """Every rank's gradient at the model's parameters, given to ``takers``; the mean loss."""
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
    """Mean loss and accuracy (None where targets are not class numbers), in eval mode."""
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
    """Settings that every record tells, as JSON can hold them."""
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
    """Each rank's own copy of the model's buffers."""

    def __init__(self, model: torch.nn.Module, workers: int) -> None:
        self._live = list(model.buffers())
        self._copies = [[b.clone() for b in self._live] for _ in range(workers)]

    def load(self, rank: int) -> None:
        for live, own in zip(self._live, self._copies[rank], strict=True):
            live.copy_(own)

    def store(self, rank: int) -> None:
        for live, own in zip(self._live, self._copies[rank], strict=True):
            own.copy_(live)
