"""Laws of gradients for ``fresh_data.py``: samplers of buckets, and exact errors on them.

Nothing here imports the package.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BLOCKS = 16
BATCHES = 24  # minibatches of LeNet; the first half is fitted to, the second half is fresh

# sampler(draw, count, size, fresh) -> float32 (count, size)
Sampler = Callable[[np.random.Generator, int, int, bool], np.ndarray]


def _independent(law: Callable) -> Sampler:
    return lambda draw, count, size, fresh: law(draw, (count, size)).astype(np.float32)


def layered(draw: np.random.Generator, count: int, size: int, fresh: bool) -> np.ndarray:
    """Buckets of different scales and shapes, as the layers of a model: normal, Laplace, Student-3,
    and normal in one coordinate of ten; scales are log-normal, a factor of 3 at one sigma."""
    shapes = [
        draw.standard_normal((count, size), dtype=np.float32),
        draw.laplace(size=(count, size)).astype(np.float32),
        draw.standard_t(3, (count, size)).astype(np.float32),
        draw.standard_normal((count, size), dtype=np.float32) * (draw.random((count, size)) < 0.1),
    ]
    kind = draw.integers(len(shapes), size=count)
    scales = 3 ** draw.standard_normal(count).astype(np.float32)
    return np.choose(kind[:, None], shapes) * scales[:, None]


def lenet(draw: np.random.Generator, count: int, size: int, fresh: bool) -> np.ndarray:
    """Full buckets of LeNet's gradient at step 50, each of a minibatch drawn at random."""
    gradients = lenet_gradients()
    half = len(gradients) // 2
    rows = gradients[half:] if fresh else gradients[:half]
    whole = rows.shape[1] // size
    buckets = rows[:, : whole * size].reshape(-1, size)
    return buckets[draw.choice(len(buckets), min(count, len(buckets)), replace=False)]


@functools.cache
def lenet_gradients(step: int = 50) -> np.ndarray:
    """Gradients of minibatches of 64 at the same parameters, float32 (BATCHES, 431080)."""
    sys.path.insert(0, str(EXAMPLES))
    from lenet import LeNet, read_images, split

    torch.manual_seed(0)
    train, _ = split(*read_images())
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    recorded = []
    for now in range(step + BATCHES):
        images, digits = train[torch.randint(len(train), (64,), generator=generator)]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), digits).backward()
        if now < step:
            optimizer.step()
        else:
            recorded.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy())
    return np.stack(recorded)


LAWS: dict[str, Sampler] = {
    "normal": _independent(lambda draw, shape: draw.standard_normal(shape)),
    "laplace": _independent(lambda draw, shape: draw.laplace(size=shape)),
    "student3": _independent(lambda draw, shape: draw.standard_t(3, shape)),
    "student1.5": _independent(lambda draw, shape: draw.standard_t(1.5, shape)),
    "layered": layered,
    "lenet": lenet,
}


class Fresh:
    """Fresh buckets in ``BLOCKS`` blocks, sorted, with weighted moments of r cumulated.

    v: (buckets, size). normalized: buckets weigh alike instead of as ||v||^2.
    totals: of each block, the weighted sum of ||v||_2^2/||v||^2, which errors are relative to.
    """

    def __init__(self, v: np.ndarray, norm: str, normalized: bool) -> None:
        blocks = [_sorted(block, norm, normalized) for block in np.array_split(v, BLOCKS)]
        self._sorted = [(r, moments) for r, moments, _ in blocks]
        self.totals = np.array([total for _, _, total in blocks])

    def errors(self, magnitudes: np.ndarray, symmetric: bool) -> np.ndarray:
        """Of each block, the weighted sum of (u - r)(r - l)."""
        signed = np.concatenate([-magnitudes[:1], magnitudes]) if symmetric else magnitudes
        low, high = signed[:-1], signed[1:]
        sums = []
        for r, moments in self._sorted:
            # Nothing lies at or below -l1; between it and l1 the folded r count once.
            at = np.searchsorted(r, signed, side="right")
            mass, mean, second = np.diff(moments[:, at], axis=1)
            sums.append(((low + high) * mean - second - low * high * mass).sum())
        return np.array(sums)


def _sorted(v: np.ndarray, norm: str, normalized: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Ascending r, the sums of w, w r, w r^2 of all before each, and the total."""
    v = np.abs(v[np.any(v != 0, axis=1)].astype(np.float64))
    norms = np.linalg.norm(v, axis=1) if norm == "l2" else v.max(axis=1)
    r = np.minimum(v / norms[:, None], 1.0)
    weights = np.ones(len(v)) if normalized else norms**2
    total = float(weights @ np.sum(r**2, axis=1))
    order = np.argsort(r, axis=None)
    r, w = r.reshape(-1)[order], np.repeat(weights, v.shape[1])[order]
    sums = np.cumsum(np.stack([w, w * r, w * r**2]), axis=1)
    return r, np.concatenate([np.zeros((3, 1)), sums], axis=1), total
