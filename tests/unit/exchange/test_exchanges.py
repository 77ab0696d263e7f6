"""Every exchange, all ranks in this process; tests/oracle judges averages of all schemes."""

from __future__ import annotations

import pytest
import torch
from parcels import begun, parcel
from simulated_steps import take_step
from test_averages import KINDS

from hvd_adaptive import ALQ, QSGD, Hierarchical, simulate
from hvd_adaptive.coding.payload import OwnedBuffer
from hvd_adaptive.exchange.auto import EXCHANGES, name_of_exchange
from hvd_adaptive.simulate.stages import together
from hvd_adaptive.transport.collectives import AllGather, AllToAll

SIZES = (5000, 30, 1, 2300)


def averaged(compressor, workers: int, dtype=torch.float32, sizes=SIZES):
    """Ranks' gradients and their average, as vectors, by parameter."""
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes]
    ranks = simulate.Ranks([(str(i), p) for i, p in enumerate(parameters)], compressor, workers)
    draw = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(n, generator=draw).to(dtype) for n in sizes] for _ in range(workers)]
    exact = [torch.stack(own).double().mean(dim=0) for own in zip(*gradients, strict=True)]
    return exact, take_step(ranks, 0, parameters, gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_are_as_many_as_are_sent(kind):
    """Over torch.distributed, ranks submit collectives by these numbers."""
    codec, asked = QSGD(bits=4, bucket_size=64).parts.default, []
    exchanges, flats = [KINDS[kind](rank) for rank in range(4)], [torch.ones(1000)] * 4
    routes = [
        begun(exchange.average(parcel(codec, flat, 900, 1 / 4), flat, flat.clone()), asked.append)
        for exchange, flat in zip(exchanges, flats, strict=True)
    ]
    together(routes)
    assert len(asked) == 4 * exchanges[0].collectives(1000)


@pytest.mark.parametrize(("factor", "wanted"), [(0.5, 65504.0), (1.0, torch.inf)])
def test_narrowed_limits_averages_of_two_ranks_and_no_sums(factor, wanted):
    own = parcel(QSGD(bits=4).parts.default, torch.zeros(4, dtype=torch.float16), 4, factor)
    assert own.narrowed(torch.full((4,), 7e4), 4, 2).tolist() == [wanted] * 4


def test_refuses_nodes_that_cannot_be():
    for per_node in (None, 3):
        with pytest.raises(ValueError, match="ranks_per_node"):
            averaged(QSGD(exchange=Hierarchical(ranks_per_node=per_node)), 4)


def test_borrowed_memory_is_refused():
    lent = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(TypeError, match="OwnedBuffer"):
        AllGather(lent)
    with pytest.raises(TypeError, match="OwnedBuffer"):
        AllToAll([OwnedBuffer(8), lent])


def test_memory_to_send_is_its_own():
    lent = torch.arange(6, dtype=torch.float32)
    copy = OwnedBuffer.copy_of(lent.view(2, 3).T)
    lent.zero_()
    wanted = torch.tensor([0.0, 3, 1, 4, 2, 5])
    assert torch.equal(copy.bytes.view(torch.float32), wanted)
    whole = OwnedBuffer(10)
    part = whole.part(4, 8)
    part.bytes.fill_(7)
    assert whole.bytes[4:8].eq(7).all() and part.size == 4 and whole.size == 10


def test_the_number_of_ranks_decides_unless_an_exchange_is_given():
    for ranks, chosen in {1: "allgather", 3: "allgather", 4: "scatter_reduce"}.items():
        assert name_of_exchange(ALQ().settings, ranks) == chosen
    for name in EXCHANGES:
        assert all(name_of_exchange(ALQ(exchange=name).settings, n) == name for n in (2, 64))
    assert ALQ().report()["exchange"] is None
    assert ALQ(exchange="auto").report()["exchange"] == "auto"
