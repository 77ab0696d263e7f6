"""First stages that lose nothing: the second one must not, either."""

from __future__ import annotations

import pytest
import torch
from scheme_cases import scheme
from test_exchanges import averaged

from hvd_adaptive import Hierarchical, SparseSGD
from hvd_adaptive.codec.second_stage import FULL_PRECISION, default_bits

# Each coordinate is its own bucket, and so its own scale; or all of them are sent.
LOSSLESS = {
    "sparse": scheme("sparse-1.0"),
    "qsgd-linf": scheme("qsgd-3-linf", bucket_size=1),
    "nuqsgd": scheme("nuqsgd-3", bucket_size=1),
    "orq": scheme("orq-5", bucket_size=1),
    "bingrad": scheme("bingrad", bucket_size=1),
    "onebit": scheme("onebit-no-feedback", bucket_size=1),
}


@pytest.mark.many
@pytest.mark.parametrize("scheme", LOSSLESS)
def test_averages_are_exact(scheme):
    """On 3 nodes of 2 ranks."""
    exact, found = averaged(
        LOSSLESS[scheme](exchange=Hierarchical(ranks_per_node=2)), 6, sizes=(1100, 30)
    )
    for want, got in zip(exact, found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", ["sparse", "qsgd-linf", "orq"])
def test_second_stage_is_in_full_precision(scheme):
    """A density of one; a table, a table for each bucket, of which each has one coordinate."""
    assert default_bits(LOSSLESS[scheme]().parts.default, 5) == FULL_PRECISION


def test_a_little_loss_is_not_none():
    """One coordinate in a hundred is lost by chance: 8 bits, and a warning, as before."""
    assert default_bits(SparseSGD(density=0.99).parts.default, 4) == 8
