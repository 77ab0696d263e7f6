"""List the sizes of well-known models."""

from __future__ import annotations

import numpy as np

# Tensors and coordinates. ResNets and VGG: for ImageNet, as torchvision builds them; BERT (base,
# uncased, with pooler) and GPT-2 (small): as Hugging Face does; LeNet: Caffe's; lstm: two layers of
# 472 units over 10,000 words.
MODELS = {
    "lenet": (8, 431_080),
    "resnet18": (62, 11_689_512),
    "lstm": (11, 13_022_096),
    "resnet50": (161, 25_557_032),
    "bert-base": (199, 109_482_240),
    "gpt2": (148, 124_439_808),
    "vgg16": (32, 138_357_544),
}


def tensors_and_coordinates(model: str | None, params: int | None) -> tuple[int, int]:
    """Return the tensors and coordinates of a model, or of ``params`` coordinates, if given, in
    tensors of a ResNet-50's mean size."""
    if params is None:
        return MODELS[str(model)]
    tensors, coordinates = MODELS["resnet50"]
    return max(1, round(params * tensors / coordinates)), params


# One in TENSORS_A_WEIGHT tensors is a weight, the others are biases and norms. The largest weight
# is GROWTH times the smallest.
TENSORS_A_WEIGHT, GROWTH = 3, 64.0
SMALL = 512


def shapes(tensors: int, coordinates: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of ``tensors`` tensors with ``coordinates`` in all, at least one in
    each.

    They are as convolutional networks have them: weights that grow with the depth, each followed by
    small tensors.
    """
    weights = -(-tensors // TENSORS_A_WEIGHT)
    others = tensors - weights
    small = min(SMALL, max(1, coordinates // (1000 * max(1, others))))
    growing = GROWTH ** (np.arange(weights) / max(1, weights - 1))
    rest = coordinates - small * others - weights
    edges = np.rint(rest * np.append(0, np.cumsum(growing)) / growing.sum()).astype(np.int64)
    sizes = iter((1 + np.diff(edges)).tolist())
    return [
        (f"layer{k // TENSORS_A_WEIGHT:04d}.weight", (next(sizes),))
        if k % TENSORS_A_WEIGHT == 0
        else (f"layer{k // TENSORS_A_WEIGHT:04d}.small{k % TENSORS_A_WEIGHT}", (small,))
        for k in range(tensors)
    ]
