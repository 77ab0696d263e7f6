"""Names and shapes of real networks' parameters, from the tables in shapes/."""

from __future__ import annotations

import math
from pathlib import Path

from hvd_adaptive.tools.bench.backward import Shapes
from hvd_adaptive.tools.bench.models import MODELS

FOLDER = Path(__file__).parent / "shapes"

# Tensors and coordinates of each table. lstm: embedding, two layers and output over 10,000 words
# (Penn Treebank), 472 units. llama, vgg, bert: small ones with the names of Hugging Face's Llama
# (10 layers of 256, 8,192 tokens), torchvision's VGG-11 (for images of 32 x 32 pixels) and Hugging
# Face's BERT (4 layers of 256). tiny: for tests.
SIZES = {name: MODELS[name] for name in ("resnet18", "resnet50", "lstm")} | {
    "llama": (93, 11_121_920),
    "vgg": (22, 11_820_392),
    "bert": (73, 11_171_074),
    "tiny": (6, 121_892),
}


def read_shapes(model: str) -> Shapes:
    """(name, shape) of each parameter, in the order of the forward pass.

    ValueError where there is no such table, or where one was cut or changed.
    """
    if model not in SIZES:
        raise ValueError(f"model={model!r}: must be one of {', '.join(map(repr, SIZES))}")
    shapes: Shapes = []
    for line in (FOLDER / f"{model}.txt").read_text(encoding="utf-8").splitlines():
        name, *sizes = line.split()
        shapes.append((name, tuple(map(int, sizes))))
    found = len(shapes), sum(math.prod(shape) for _, shape in shapes)
    if found != SIZES[model]:
        raise ValueError(f"{model}.txt: holds {found} tensors and numbers, not {SIZES[model]}")
    return shapes
