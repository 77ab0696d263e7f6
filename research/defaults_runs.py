"""The runs of defaults.py: embeddings of synthetic texts, and a LeNet, with two ranks each."""

from __future__ import annotations

import functools
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compare_tasks import Data, mnist
from from_examples import LeNet
from kept_run import KeptRun
from torch import nn

from hvd_adaptive import simulate
from hvd_adaptive.tools.methods import read

RANKS, BATCH = 2, 32
ROWS, WIDTH, PADDING = 2000, 64, 0  # of the embedding; the row of padding
CLASSES, WORDS, LENGTH = 10, 999, 20  # words that occur, of a text
SPREAD = 0.7  # standard deviation of the logarithm of a word's frequency between classes
TRAINED, TESTED, TOLD_LOSS = 20_000, 2000, 2000  # texts


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        title: As the page names it.
        model: "mean" or "sum" of a text's embeddings, or "lenet".
        optimizer: A class of torch.optim.
        rate: Learning rate.
        steps: Of a run.
        padded: Positions of a text, those of padding included.
    """

    title: str
    model: str
    optimizer: str
    rate: float
    steps: int
    padded: int = LENGTH

    def step_by(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer."""
        momentum = {"momentum": 0.9} if self.model == "lenet" else {}
        return getattr(torch.optim, self.optimizer)(parameters, lr=self.rate, **momentum)


# Rates: of SGD 5, 10, 20, 30 and Adam 0.003, 0.01, 0.03 those with which float32 is accurate.
TASKS = {
    "bags-sgd": Task("Means of embeddings, SGD", "mean", "SGD", 20.0, 300),
    "bags-adam": Task("Means of embeddings, Adam", "mean", "Adam", 0.01, 300),
    "sums-20": Task("Sums of embeddings, no padding, Adam", "sum", "Adam", 0.01, 200),
    "sums-50": Task("Sums, texts padded to 50, Adam", "sum", "Adam", 0.01, 200, 50),
    "sums-200": Task("Sums, texts padded to 200, Adam", "sum", "Adam", 0.01, 200, 200),
    "lenet": Task("LeNet, MNIST", "lenet", "SGD", 0.01, 700),
}


class Classifier(nn.Module):
    """A linear classifier of the mean, or the sum, of a text's embeddings."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, padding_idx=PADDING)
        self.scores, self.mean = nn.Linear(WIDTH, CLASSES), mean

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """Return scores (batch, classes) of texts (batch, positions)."""
        vectors = self.embedding(texts)
        return self.scores(vectors.mean(1) if self.mean else vectors.sum(1))


@functools.lru_cache
def texts() -> tuple[Data, Data]:
    """Return texts and classes to train and to test with, int64, always the same.

    A text is 20 independent words, drawn by the frequencies of its class. The 999 words are rows of
    the embedding that are drawn from all but the padding's.
    """
    draw = torch.Generator().manual_seed(0)
    words = 1 + torch.randperm(ROWS - 1, generator=draw)[:WORDS]
    frequencies = (SPREAD * torch.randn(CLASSES, WORDS, generator=draw)).softmax(1)
    classes = torch.randint(CLASSES, (TRAINED + TESTED,), generator=draw)
    drawn = frequencies[classes].multinomial(LENGTH, replacement=True, generator=draw)
    whole = words[drawn]
    return (whole[:TRAINED], classes[:TRAINED]), (whole[TRAINED:], classes[TRAINED:])


@functools.lru_cache
def data_of(task: Task) -> tuple[Data, Data]:
    """Return what a task trains and tests with."""
    if task.model == "lenet":
        return mnist()
    train, test = ((F.pad(x, (0, task.padded - LENGTH), value=PADDING), y) for x, y in texts())
    return train, test


@dataclass(frozen=True)
class Run(KeptRun):
    """A training run. Equal seeds start from equal weights, and see equal batches."""

    task: str
    method: str
    seed: int
    steps: int

    def path(self, folder: Path) -> Path:
        """Return the file of its records."""
        name = re.sub(r"[^\w.]+", "-", self.method).strip("-")
        return folder / self.task / f"{name}-{self.steps}t-{self.seed}.csv"

    @property
    def settings(self) -> dict[str, Any]:
        """Return what its records must have been made with to be used again."""
        return asdict(self) | asdict(TASKS[self.task]) | {"batch": BATCH}

    def compressor(self) -> Any:
        """Return the method's compressor, or None for float32."""
        (method,) = read(self.method)
        if not method.is_scheme:
            return None
        return method.having(seed=self.seed).scheme()

    def execute(self, folder: Path) -> None:
        """Train, and write the records."""
        task = TASKS[self.task]
        train, test = data_of(task)
        torch.manual_seed(self.seed)
        model = LeNet() if task.model == "lenet" else Classifier(task.model == "mean")
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        result = simulate.train(
            model,
            train,
            optimizer=task.step_by,
            compressor=self.compressor(),
            workers=RANKS,
            steps=self.steps,
            batch_size=BATCH,
            seed=self.seed,
            validation=test,
            progress=False,
        )
        loss, _ = simulate.evaluate(model, *(part[:TOLD_LOSS] for part in train))
        result.settings |= {"run": self.settings, "training_loss": loss}
        if isinstance(model, Classifier):
            after = model.embedding.weight.detach()
            result.settings["rows"] = movement(before["embedding.weight"], after, train[0])
        result.write(self.path(folder))


def movement(before: torch.Tensor, after: torch.Tensor, used: torch.Tensor) -> dict[str, Any]:
    """Return how far the embedding's rows have moved that no text uses.

    Args:
        before: The embedding (rows, width) at the start.
        after: The same at the end.
        used: Numbers of rows that texts use, that of padding included or not.

    Returns:
        rms: Root mean square of their change.
        unchanged: Whether they have the same bits.
        padding_unchanged: Whether the row of padding has the same bits.
    """
    unused = torch.ones(len(before), dtype=torch.bool)
    unused[used.unique()] = False
    unused[PADDING] = False
    same = (before.view(torch.int32) == after.view(torch.int32)).all(dim=1)
    return {
        "rms": float((after - before)[unused].square().mean().sqrt()),
        "unchanged": bool(same[unused].all()),
        "padding_unchanged": bool(same[PADDING]),
    }
