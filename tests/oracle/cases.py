"""Hypothesis draws compressors and vectors from all settings.

A compressor is the name of its class and its keywords: plain values, which a failure prints.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

Compressor = tuple[str, dict[str, Any]]
SIZES = (1, 16, 48, 64, 100, 256, 1000)
DTYPES = ("float32", "float64", "bfloat16", "float16")
OTHERS = ["ORQ", "LinearQuantile", "BinGrad", "SignSGD", "OneBitSGD", "NaturalCompression"]
OTHERS += ["SparseSGD", "ECDQ", "QCS"]
NORMS = st.sampled_from(["l2", "linf"])
BITS = st.integers(2, 8)
FLAGS = st.booleans()


def coding(symmetric: bool) -> st.SearchStrategy:
    """Elias codes need a level zero."""
    return st.sampled_from(["fixed", "huffman"] + ([] if symmetric else ["elias"]))


@st.composite
def tables(draw: st.DrawFn) -> Compressor:
    """A scheme whose buckets share a table."""
    name = draw(st.sampled_from(["ALQ", "AMQ", "QSGD", "NUQSGD", "TernGrad"]))
    keywords: dict[str, Any] = {}
    symmetric = False
    if name != "TernGrad":
        keywords |= {"norm": draw(NORMS), "bits": draw(BITS)}
        symmetric = keywords["symmetric"] = draw(FLAGS)
    if name == "QSGD" and not symmetric and draw(FLAGS):
        del keywords["bits"], keywords["symmetric"]
        keywords["intervals"] = draw(st.sampled_from([1, 2, 4, 5, 11, 127]))
    if name == "NUQSGD":
        keywords["multiplier"] = draw(st.sampled_from([0.5, 0.6, 0.8]))
    if name in ("ALQ", "AMQ"):
        keywords["normalized"] = draw(FLAGS)
        keywords["statistics"] = draw(st.sampled_from(["histogram", "histogram", "normal"]))
    if name == "ALQ":
        keywords["solver"] = draw(st.sampled_from(["coordinate_descent", "gradient_descent"]))
    keywords["coding"] = draw(coding(symmetric))
    return name, keywords


@st.composite
def others(draw: st.DrawFn) -> Compressor:
    """The other schemes."""
    name = draw(st.sampled_from(OTHERS))
    keywords: dict[str, Any] = {}
    if name == "ORQ":
        keywords["levels"] = draw(st.sampled_from([3, 5, 9, 17]))
        keywords["solver"] = draw(st.sampled_from(["greedy", "coordinate_descent"]))
    if name == "LinearQuantile":
        keywords["levels"] = draw(st.sampled_from([2, 3, 9, 10, 100]))
    if name in ("ORQ", "LinearQuantile"):
        keywords["level_dtype"] = draw(st.sampled_from(["float32", "float16"]))
    if name == "BinGrad":
        keywords["variant"] = draw(st.sampled_from(["partially_biased", "biased"]))
        keywords["iterate"] = keywords["variant"] == "biased" and draw(FLAGS)
    if name == "SparseSGD":
        keywords["density"] = draw(st.sampled_from([0.01, 0.1, 0.5, 0.9, 1.0]))
    if name == "ECDQ" and draw(FLAGS):
        keywords["relative_variance"] = draw(st.sampled_from([1e-4, 0.01, 0.3, 3.0]))
    elif name == "ECDQ":
        keywords["bits"] = draw(st.sampled_from([3.0, 4.5, 8.0]))
    if name == "QCS":
        keywords["estimator"] = draw(st.sampled_from(["unbiased", "mmse"]))
        keywords["quantizer_range"] = draw(st.sampled_from([0.5, 1, 2, 7, 127]))
    if name == "OneBitSGD":
        keywords["error_feedback"] = None
    return name, keywords


@st.composite
def compressors(draw: st.DrawFn) -> Compressor:
    """Any scheme, with the keywords that matter to a codec."""
    name, keywords = draw(st.one_of(tables(), others()))
    sizes = [16, 32, 64] if name == "QCS" else SIZES[1:] if name == "ECDQ" else SIZES
    keywords["bucket_size"] = draw(st.sampled_from(sizes))
    keywords["keep_zeros"] = False  # the papers round zeros, too
    if name == "QCS":
        size = keywords["bucket_size"]
        keywords["measurements"] = draw(st.sampled_from([size // 4, size // 2 + 1, size]))
    keywords["tail"] = draw(st.sampled_from(["quantize", "full"]))
    if draw(st.integers(0, 3)) == 0:
        keywords["clip"] = draw(st.sampled_from([0.5, 1.7, 2.5]))
    return name, keywords


LAWS = ("normal", "laplace", "cubes", "student", "layers", "sparse", "constant")


def vector(law: str, count: int, seed: int | list[int]) -> np.ndarray:
    """Coordinates of a law (float64); the stretches of "layers" differ a thousandfold in size."""
    rng = np.random.default_rng(seed)
    v = rng.standard_normal(count)
    if law == "laplace":
        return rng.laplace(size=count)
    if law == "cubes":
        return v**3
    if law == "student":
        return rng.standard_t(3, count)
    if law == "layers":
        sizes = 10.0 ** rng.uniform(-3, 1, count // 50 + 1)
        return v * np.repeat(sizes, 50)[:count]
    if law == "sparse":
        return v * (rng.random(count) < 0.1)
    if law == "constant":
        return np.full(count, v[:1] if count else 0.0)
    return v
