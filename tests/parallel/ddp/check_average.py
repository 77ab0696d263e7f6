"""average() over torch.distributed."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from list_averages import *  # noqa: F403
from list_averages import drawn
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive import EDEN, QSGD, LocalSGD, ScatterReduce, SignSGD, average
from hvd_adaptive.ddp import CompressionState, compression_hook
from hvd_adaptive.exchange import hierarchical
from hvd_adaptive.transport.world import find_nodes

RANK, RANKS = dist.get_rank(), dist.get_world_size()


def test_groups():
    """Pairs of ranks average among themselves."""
    pairs = [list(range(first, min(first + 2, RANKS))) for first in range(0, RANKS, 2)]
    groups = [dist.new_group(pair) for pair in pairs]
    pair, group = pairs[RANK // 2], groups[RANK // 2]
    compressor = QSGD(bits=8, norm="linf")
    (result,) = average(drawn(RANK, 0)[:1], compressor, group=group)
    wanted = torch.stack([drawn(rank, 0)[0] for rank in pair]).mean(0)
    assert (result - wanted).norm() < 0.02 * wanted.norm()
    with pytest.raises(ValueError, match="serves another group"):
        average([result], compressor)
    compressor.close()
    average([result], compressor)


def test_groups_that_not_all_ranks_are_members_of():
    """The program's own: ranks then have different numbers of groups."""
    for _ in range(2):
        dist.new_group([0])
    group = dist.new_group()  # no group of a closed world is there
    for step in range(2):
        (result,) = average(drawn(RANK, step)[:1], QSGD(bits=8, norm="linf"), group=group)
        wanted = torch.stack([drawn(rank, step)[0] for rank in range(RANKS)]).mean(0)
        assert (result - wanted).norm() < 0.02 * wanted.norm()


def test_buckets_of_a_nan_are_counted():
    """Buckets of keep_zeros=True begin at other coordinates, and a zero in them stays zero."""
    compressor = EDEN(bits=2, bucket_size=64, min_numel=0, keep_zeros=True)
    given = torch.ones(512)
    given[::64] = 0
    given[70] = torch.nan if RANK == 0 else 1
    (result,) = average([given], compressor)
    wanted = result.view(8, 64).isnan().any(1).sum()
    assert compressor.report()["non_finite"] == wanted > 0


def test_residuals_of_zeros_wait():
    """As those of a tensor that all ranks lack; a value on one rank suffices to send them."""
    compressor = SignSGD(error_feedback=1.0, min_numel=0)
    given, zeros = torch.tensor([1.0, 3.0, -2.0]), torch.zeros(3)
    (first,) = average([given], compressor)
    (second,) = average([zeros], compressor)
    assert not second.any()
    residual = compressor.state_dict()["residuals"]["parameters"]["0"].clone()
    assert torch.equal(residual, given - first)
    (third,) = average([zeros + 1e-6 * (RANK == 0)], compressor)
    assert third.abs().min() > 0.5


def test_sums_that_overflow():
    given = torch.full((64,), 3e38)
    for bits, wanted in ((None, torch.isnan), (32, torch.isinf)):
        exchange = ScatterReduce(second_stage_bits=bits)
        compressor = QSGD(bits=8, norm="linf", exchange=exchange, min_numel=0)
        (result,) = average([given], compressor)
        assert wanted(result).all()
    (result,) = average([given], QSGD(bits=8, norm="linf", exchange="allgather", min_numel=0))
    assert result.isinf().all()


def test_ranks_are_found_again(tmp_path):
    """After the program has destroyed its process groups and made others; not in between."""
    compressor, (given,), place = QSGD(bits=8, norm="linf"), drawn(RANK, 0)[:1], [str(tmp_path)]
    average([given], compressor)
    dist.broadcast_object_list(place)
    dist.barrier()
    dist.destroy_process_group()
    for again in (compressor, QSGD(bits=4)):
        for async_op in (False, True):
            with pytest.raises(RuntimeError, match=r"before torch.*init_process_group\(\)"):
                average([given], again, async_op=async_op)
    store = dist.FileStore(f"{place[0]}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS)
    (result,) = average([given], compressor)
    wanted = torch.stack([drawn(rank, 0)[0] for rank in range(RANKS)]).mean(0)
    assert (result - wanted).norm() < 0.02 * wanted.norm() and compressor.step == 2


def test_one_compressor_serves_one_caller():
    model = torch.nn.Linear(3, 3)
    compressor = QSGD(bits=4)
    state = CompressionState(compressor, model.named_parameters())
    with pytest.raises(ValueError, match="already serves an optimizer or a model"):
        average([torch.ones(3)], compressor)
    compressor.close()
    average([torch.ones(3)], compressor)
    with pytest.raises(RuntimeError, match="serves average"):
        state.process_group = None
    other = QSGD(bits=4)
    average([torch.ones(3)], other)
    with pytest.raises(ValueError, match="already serves"):
        CompressionState(other, model.named_parameters())
    with pytest.raises(RuntimeError, match="serves average"):
        other.compress(torch.ones(3))
    third = QSGD(bits=4)
    local = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=1, compression=third)
    third.close()
    local.step()  # it serves LocalSGD again
    with pytest.raises(ValueError, match="already serves"):
        average([torch.ones(3)], third)
    third.close()
    average([torch.ones(3)], third)
    for use in (local.step, local.connect):
        with pytest.raises(RuntimeError, match="of a model of LocalSGD serves average"):
            use()
    average([torch.ones(3)], third)
    third.close()
    local.connect()
    local.average()
    assert third.report()["coordinates"] == 12


@pytest.mark.parametrize("door", ["ddp", "local"])
def test_settings_change_while_a_compressor_is_closed(door):
    """The next step is laid out anew."""
    model = torch.nn.Linear(64, 64, bias=False)
    compressor = QSGD(bits=4, parameter_bits={"weight": 2})
    step, serving = torch.optim.SGD(model.parameters(), lr=0.1).step, model
    if door == "local":
        named, sgd = model.named_parameters(), torch.optim.SGD(model.parameters(), lr=0.1)
        step = LocalSGD(sgd, every=1, compression=compressor, named_parameters=named).step
    else:
        serving = DistributedDataParallel(model)
        state = CompressionState(compressor, model.named_parameters())
        serving.register_comm_hook(state, compression_hook)
    for bits in (2, 8):
        serving(drawn(RANK, 0)[0].view(-1)[:64]).sum().backward()
        step()
        assert compressor.report()["bits_per_coordinate"] == pytest.approx(bits, abs=0.5)
        compressor.close()
        compressor.set(parameter_bits={"weight": 8})


def test_two_lists_are_set_up_at_the_same_time(monkeypatch):
    """Each in its thread, of which ranks begin one or the other first; nodes are found by a
    collective."""
    first = []

    def find_later(world, name):
        if RANK == 1 and not first:
            first.append(world)
            time.sleep(0.5)
        return find_nodes(world, name)

    monkeypatch.setattr(hierarchical, "find_nodes", find_later)
    schemes = [QSGD(bits=8, exchange="hierarchical", seed=seed) for seed in (1, 2)]
    own = torch.full([4096], float(RANK))
    averages = [average([own], scheme, async_op=True) for scheme in schemes]
    for each in averages:
        (result,) = each.wait()
        assert torch.equal(result, torch.full([4096], (RANKS - 1) / 2))
