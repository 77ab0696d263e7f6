"""What is in force in a compressor, read from its public attributes, as an oracle's Quantiser.

Any object with these attributes will do; nothing of the package is imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import wire_decoder as wire

from oracle.laws import Quantiser

TABLES = wire.SHARED_TABLE
GIVEN = ["norm", "variant", "iterate", "density", "delta"]
GIVEN += ["measurements", "quantizer_range", "estimator"]
NUMBERS = {"biased": 2, "partially_biased": 1}


def quantiser_of(given: Any, values: np.ndarray) -> Quantiser:
    """The quantiser of a compressor or codec, for a vector of these ``values`` (float64).

    Levels that each bucket has of its own are those of a payload that it makes of the vector.
    """
    codec = codec_of(given)
    found: dict[str, Any] = {name: getattr(codec, name) for name in GIVEN if hasattr(codec, name)}
    settings = codec.settings
    if codec.name in TABLES:
        found["levels"] = np.asarray(codec.levels, np.float64)
    if codec.name in ("orq", "linear_quantile", "bingrad"):
        found["of_bucket"] = own_levels(codec, values)
    return Quantiser(codec.name, settings.bucket_size, settings.clip, **found)


def known_of(given: Any) -> wire.Known:
    """What a receiver knows without the payload."""
    codec = codec_of(given)
    names = ("measurements", "quantizer_range", "estimator", "density", "level_dtype")
    found = {name: getattr(codec, name) for name in names if hasattr(codec, name)}
    if codec.name in TABLES:
        found["levels"] = np.asarray(codec.levels, np.float64)
        found["probabilities"] = codec.table.probabilities
    if codec.name == "bingrad":
        found["numbers"] = NUMBERS[codec.variant]
    if codec.name == "ecdq":
        found["probabilities"] = codec.code.probabilities
    if codec.name == "eden":
        found |= {"levels": codec.levels, "share": min(codec.bits, 1.0)}
    return wire.Known(**found)


def codec_of(given: Any) -> Any:
    """That of a compressor's default part; a codec's own."""
    return given.parts.default if hasattr(given, "parts") else given


def own_levels(given: Any, values: np.ndarray) -> np.ndarray:
    """The levels of each bucket, by the payload of ``values``."""
    codec = codec_of(given)
    flat = torch.from_numpy(values.astype(np.float32))
    payload = codec.payloads.encode(flat, codec.settings.quantized_part(flat.numel()), 0).bytes
    head, body, _, _ = wire.sections(payload.numpy().tobytes())
    count = head["coordinates"] - head["full"]
    return wire.levels_of_buckets(head, body, count, known_of(codec))[0].astype(np.float64)
