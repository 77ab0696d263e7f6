"""Calls of ``hvd.allreduce`` over process sets, without an optimizer, and process sets that differ
from the compressor's. Optimizers of process sets are in check_optimizers.py."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from training import distributed, make_model, restart, train

from hvd_adaptive import QSGD, RankMismatchError

pytestmark = pytest.mark.ranks


@pytest.fixture
def sets():
    """Even ranks and odd ones."""
    made = [hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in (0, 1)]
    yield made
    hvd.barrier()
    for process_set in made:
        hvd.remove_process_set(process_set)


@pytest.fixture
def mine(sets):
    return sets[hvd.rank() % 2]


def own() -> torch.Tensor:
    return torch.full((3000,), float(hvd.rank() + 1))


def exact(process_set, op) -> float:
    total = float(sum(rank + 1 for rank in process_set.ranks))
    return total / len(process_set.ranks) if op == hvd.Average else total


@pytest.mark.parametrize("named", [False, True])
def test_process_sets_of_calls_are_found(mine, named):
    """One compressor serves several in turn; none is given to it."""
    weights = [torch.nn.Parameter(own()) for _ in range(2)]
    for weight in weights:
        weight.grad = own()
    pairs = [(str(place), weight) for place, weight in enumerate(weights)]
    compressor = QSGD(bits=8, norm="linf", named_parameters=pairs if named else None)
    gradients = [weight.grad for weight in weights]
    for step in range(2):
        for op in (hvd.Sum, hvd.Average):
            for process_set in (mine, hvd.global_process_set):
                call = {"op": op, "process_set": process_set, "compression": compressor}
                name = f"sets.{step}.{op}.{named}"
                results = hvd.grouped_allreduce(gradients, name=f"{name}.grouped", **call)
                results.append(hvd.allreduce(gradients[0], name=name, **call))
                for result in results:
                    wanted = torch.full_like(result, exact(process_set, op))
                    torch.testing.assert_close(result, wanted, rtol=1e-3, atol=0.0)
    assert compressor.step == 16


def test_a_reduction_that_compress_does_not_see(mine):
    """Ranks outside of the process set look as if they had called hvd.join()."""
    compressor = QSGD(bits=8, norm="linf")
    small, ctx = compressor.compress(own())
    small = hvd.allreduce(small, op=hvd.Sum, process_set=mine, name="sets.unseen")
    with pytest.raises(ValueError, match=r"process_set: .* give the compressor the process set"):
        compressor.decompress(small, ctx)
    compressor = QSGD(bits=8, norm="linf", process_set=mine)
    small, ctx = compressor.compress(own())
    small = hvd.allreduce(small, op=hvd.Sum, process_set=mine, name="sets.given")
    result = compressor.decompress(small, ctx).mean().item()
    assert result == pytest.approx(exact(mine, hvd.Sum), rel=1e-3)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("door", ["optimizer", "call"])
def test_a_keyword_that_differs_from_the_caller(mine, door, everywhere):
    """All ranks fail, also those that were not given it."""
    given = mine if everywhere or hvd.rank() == 0 else None
    compressor = QSGD(bits=8, norm="linf", process_set=given)
    kind = ValueError if everywhere else RankMismatchError
    told = "process_set: has ranks .* must be None or the process set of " if everywhere else ""
    with pytest.raises(kind, match=told or "process_set is not the caller's on rank 0"):
        if door == "call":
            hvd.allreduce(own(), compression=compressor, name=f"sets.conflict.{everywhere}")
        else:
            model = make_model(width=30)
            optimizer = distributed(model, compressor, prefix=f"sets.conflict.{everywhere}.")
            try:
                train(model, optimizer, 1)
            finally:
                restart(optimizer)
