"""What the recipes of docs/recipes.md print."""

from __future__ import annotations

import re

# The loss that a training of 60 steps must reach.
RECIPES = {"trainer": 3.3, "accelerate": 1.0, "lightning": 1.0}


def check_recipe(name: str, told: str) -> None:
    """The loss falls. 3 bits, and headers and scales of a small model; uncompressed gradients have
    32 bits, and a hook that was never called reports 0."""
    (last,) = re.findall(r"loss (?:[\d.]+ to )?(\d+\.\d+)", told)
    assert float(last) < RECIPES[name], told
    (bits,) = re.findall(r"([\d.]+) bits per coordinate", told)
    assert 3 < float(bits) < 4, told
