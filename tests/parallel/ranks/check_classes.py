"""``compression=ALQ``, the class: as ALQ() where that can be, else an error with advice."""

from __future__ import annotations

import io
import logging

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model, train

import hvd_adaptive
from hvd_adaptive import ALQ, ECDQ, QSGD, SparseSGD
from hvd_adaptive.compressor import GradientCompressor

EXPORTED = [getattr(hvd_adaptive, name) for name in hvd_adaptive.__all__]
SCHEMES = [one for one in EXPORTED if isinstance(one, type) and issubclass(one, GradientCompressor)]
NEED_KEYWORDS = [ECDQ, SparseSGD]


def distributed(model: torch.nn.Module, compression, prefix: str = "", **keywords):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    named = [(f"{prefix}{name}", p) for name, p in model.named_parameters()]
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=named, compression=compression, **keywords
    )


@pytest.mark.parametrize(
    "scheme", [s for s in SCHEMES if s not in NEED_KEYWORDS], ids=lambda s: s.__name__
)
def test_a_class_trains_as_its_instance_does(scheme):
    models = [make_model(), make_model()]
    given = distributed(models[0], scheme)
    assert given._compression is scheme
    train(models[0], given, 3)
    assert type(given._compression) is scheme and given._compression.step == 3
    assert_same_everywhere(flat_parameters(models[0]), f"{scheme.__name__} by class")


@pytest.mark.parametrize("scheme", NEED_KEYWORDS, ids=lambda s: s.__name__)
def test_a_class_that_needs_keywords_fails_at_the_first_gradient(scheme):
    model = make_model()
    optimizer = distributed(model, scheme)
    with pytest.raises(ValueError, match=rf"compression={scheme.__name__}: .*\.\.\.\)"):
        train(model, optimizer, 1)
    assert not optimizer._handles, "nothing was sent"


def exact_mean(gradients: torch.Tensor, name: str) -> torch.Tensor:
    return hvd.allgather(gradients.double()[None], name=name).mean(dim=0)


def gradients_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.detach().reshape(-1) for p in model.parameters()])


def test_two_optimizers_have_a_compressor_each():
    """The first gradient of one makes both, in the order of names, which all ranks share."""
    models = [make_model(1), make_model(2)]
    later, earlier = distributed(models[0], QSGD, "z."), distributed(models[1], QSGD, "a.")
    x, y = batches(hvd.rank())()
    torch.nn.functional.cross_entropy(models[0](x), y).backward()
    made = later._compression, earlier._compression
    assert [type(one) for one in made] == [QSGD, QSGD] and made[0] is not made[1]
    torch.nn.functional.cross_entropy(models[1](x), y).backward()
    for optimizer in (later, earlier):
        optimizer.step()
    assert made == (later._compression, earlier._compression) and made[0].step == made[1].step == 1
    for number, model in enumerate(models):
        assert_same_everywhere(gradients_of(model), f"two by class {number}")


def test_averages_and_state():
    """8 bits under L-infinity: an error of a few thousandths of what is averaged exactly here."""

    class Fine(QSGD):
        def __init__(self, **keywords) -> None:
            super().__init__(**{"bits": 8, "norm": "linf", "bucket_size": 256} | keywords)

    model, alone = make_model(), make_model()
    optimizer = distributed(model, Fine)
    x, y = batches(hvd.rank())()
    for one in (model, alone):
        torch.nn.functional.cross_entropy(one(x), y).backward()
    optimizer.synchronize()
    exact = exact_mean(gradients_of(alone), "by class, exact")
    error = (gradients_of(model).double() - exact).norm() / exact.norm()
    assert error < 0.02
    with optimizer.skip_synchronize():
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer._compression.state_dict(), file)
    file.seek(0)
    again = Fine()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.step == 1


@pytest.mark.parametrize("passes", [1, 2])
def test_groups_and_several_passes(passes):
    model = make_model()
    optimizer = distributed(model, ALQ, num_groups=2, backward_passes_per_step=passes)
    x, y = batches(hvd.rank())()
    for _ in range(2):
        for _ in range(passes):
            torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer._compression.step == 2
    assert_same_everywhere(flat_parameters(model), f"groups by class {passes}")


def test_sparse_gradients_alone():
    """Horovod calls ``decompress`` alone for them."""
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = distributed(embedding, ALQ)
    embedding(torch.tensor([hvd.rank(), 3])).sum().backward()
    optimizer.step()
    assert isinstance(optimizer._compression, ALQ)


def test_without_an_optimizer_it_is_an_error():
    with pytest.raises(ValueError, match=r"compression=ALQ: is a class.*compression=ALQ\(\)"):
        hvd.allreduce(torch.ones(9), compression=ALQ, name="by class")


def test_it_is_logged(caplog):
    model = make_model()
    with caplog.at_level(logging.INFO, logger="hvd_adaptive"):
        train(model, distributed(model, ALQ), 2)
    told = [m for m in caplog.messages if "the class is used as ALQ()" in m]
    assert len(told) == 1
