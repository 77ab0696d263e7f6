"""How large well-known models are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Tensors and coordinates. ResNets and VGG: for ImageNet, as torchvision builds them; BERT (base,
# uncased, with pooler) and GPT-2 (small): as Hugging Face does; LeNet: Caffe's; lstm: two layers of
# 472 units over 10,000 words.
MODELS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "lenet": (8, 431_080),
        "resnet18": (62, 11_689_512),
        "lstm": (11, 13_022_096),
        "resnet50": (161, 25_557_032),
        "bert-base": (199, 109_482_240),
        "gpt2": (148, 124_439_808),
        "vgg16": (32, 138_357_544),
    }
)


def tensors_and_coordinates(model: str | None, params: int | None) -> tuple[int, int]:
    """Of a model by name or, where that is None, of so many coordinates in tensors of a ResNet-50's
    mean size."""
    if model is not None:
        return MODELS[model]
    if params is None:
        raise ValueError("model=None, params=None: give one of them")
    tensors, coordinates = MODELS["resnet50"]
    return max(1, round(params * tensors / coordinates)), params


def shapes(tensors: int, coordinates: int) -> list[tuple[str, tuple[int, ...]]]:
    """So many coordinates in tensors of about equal sizes, named."""
    edges = [coordinates * k // tensors for k in range(tensors + 1)]
    return [(f"layer{k:04d}.weight", (edges[k + 1] - edges[k],)) for k in range(tensors)]
