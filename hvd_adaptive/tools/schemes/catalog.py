"""Measure the bits, errors and bias of schemes, and compute their bounds, from the classes."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import numpy as np
import torch

import hvd_adaptive
from hvd_adaptive import theory
from hvd_adaptive.base.tensors import HOST
from hvd_adaptive.changes import keywords_of
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.keywords import own_keywords
from hvd_adaptive.schemes.level_scheme import LevelScheme

# Required keywords of schemes.
REQUIRED: dict[str, dict[str, Any]] = {"ECDQ": {"bits": 2}, "SparseSGD": {"density": 0.01}}
SAMPLE = 1 << 18
# What ends with a dot and no sentence: "Eq. 4", "et al. 2017".
SENTENCE = re.compile(r"(?<!\bEq)(?<!\bEqs)(?<!\bApp)(?<!\bal)[.](?:\s|$)")


def scheme_classes() -> dict[str, type[GradientCompressor]]:
    """Return the schemes that hvd_adaptive exports, by name, in the order of ``__all__``."""
    exported = (getattr(hvd_adaptive, name) for name in hvd_adaptive.__all__)
    kinds = filter(inspect.isclass, exported)
    return {kind.__name__: kind for kind in kinds if issubclass(kind, GradientCompressor)}


def outline(name: str) -> dict[str, Any]:
    """Return what a scheme's class says.

    Returns:
        name: Name of the class.
        method: First sentence of its documentation, including the paper.
        keywords: The scheme's own keywords with their defaults ("" if there is none).
        documentation: Docstring of the class.
    """
    kind = scheme_classes()[name]
    text = inspect.getdoc(kind) or ""
    method = SENTENCE.split(text.partition("\n\n")[0].replace("\n", " "))[0]
    keywords = own_keywords(kind)
    return {"name": name, "method": method, "keywords": keywords, "documentation": text}


def entry(name: str) -> dict[str, Any]:
    """Return ``outline`` and figures of a scheme that has only its required keywords.

    Returns:
        call: How the scheme was constructed.
        bits: Bits per coordinate of SAMPLE normal coordinates, without the payload's header.
        relative_error: Measured E‖Q(v) - v‖²/‖v‖² of these, after fitting tables.
        laplacian_error: The same for Laplacian coordinates.
        bound: Proved bound of it for any v of a bucket's size with the current table, or None.
        unbiased: Whether E Q(v) = v.
    """
    kind, given = scheme_classes()[name], REQUIRED.get(name, {})
    fitted = kind(**given)
    arguments = ", ".join(f"{keyword}={value!r}" for keyword, value in given.items())
    generator = torch.Generator(device="cpu").manual_seed(1)
    normal = torch.randn(SAMPLE, generator=generator, **HOST)
    uniform = torch.rand(SAMPLE, generator=generator, dtype=torch.float64, device="cpu") - 0.5
    laplacian = (-uniform.sign() * torch.log1p(-2 * uniform.abs())).to(torch.float32)
    bits, error = measured(fitted, normal)
    return outline(name) | {
        "call": f"{name}({arguments})",
        "bits": bits,
        "relative_error": error,
        "laplacian_error": measured(kind(**given), laplacian)[1],
        "bound": bound(fitted),
        "unbiased": is_unbiased(fitted),
    }


def bound(scheme: GradientCompressor) -> float | None:
    """Return the bound of the relative variance of any gradient in buckets of its size, if any."""
    if isinstance(scheme, hvd_adaptive.NaturalCompression):
        return 1 / 8
    for name in ("gamma", "relative_variance"):  # QCS, ECDQ
        if hasattr(scheme.parts.default, name):
            return float(getattr(scheme.parts.default, name))
    if isinstance(scheme, LevelScheme) and scheme.settings.clip is None:
        codec: Any = scheme.parts.default
        table, size = codec.table, scheme.settings.bucket_size
        order = {"l2": 2.0, "linf": math.inf}[codec.norm]
        return float(theory.variance_bound(table.magnitudes, size, order, table.symmetric))
    return None


def is_unbiased(scheme: GradientCompressor) -> bool:
    """Return whether decoded gradients have the right mean, by a test on a skewed bucket.

    Sums of its coordinates with several kinds of weights must be right within five standard errors.
    """
    v = torch.from_numpy(np.random.Generator(np.random.Philox(key=1)).gamma(0.7, size=64))
    v = v.to(torch.float32).repeat(256) - 0.5
    settings = {"bucket_size": 64, "seed": 1, "min_numel": 0}
    small = type(scheme)(**keywords_of(scheme) | settings).parts.default
    decoded = [small.payloads.roundtrip(v, key).view(256, 64) for key in range(1, 17)]
    draws = torch.cat(decoded).double()
    exact = v[:64].double()
    weights = torch.stack([exact, exact.sign(), exact.abs() - exact.abs().mean(), exact**3], dim=1)
    found, expected = draws @ weights, exact @ weights
    standard_error = found.std(dim=0) / draws.shape[0] ** 0.5 + 1e-6 * expected.abs()
    return bool(((found.mean(dim=0) - expected).abs() <= 5 * standard_error).all())


def measured(scheme: Any, v: torch.Tensor) -> tuple[float, float]:
    """Fit a scheme to ``v``, and return bits per coordinate and relative squared error."""
    if hasattr(scheme, "fit"):
        scheme.fit(v)
    payload = scheme.encode(v, seed=1)
    empty = scheme.encode(v[:0], seed=1).numel()
    error = (scheme.decode(payload) - v).double().square().sum() / v.double().square().sum()
    return 8 * (payload.numel() - empty) / v.numel(), float(error)
