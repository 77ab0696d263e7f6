"""Random streams: no two compressors draw the same numbers, and a state goes on with its own."""

from __future__ import annotations

import pickle

import pytest
import torch
import unit_oracles as oracle
from scheme_cases import schemes

from hvd_adaptive import ALQ, QCS, QSGD, instances
from hvd_adaptive.instances import Instance
from hvd_adaptive.kernels.random import Use, group_number

# Every scheme that draws random numbers; the others are OneBitSGD, SignSGD and biased BinGrad.
RANDOM = schemes(
    *("qsgd-3", "qsgd-4-linf", "qsgd-3-linf-symmetric", "nuqsgd-3", "terngrad-unclipped"),
    *("alq-3", "amq-3", "orq-5", "quantile-5", "bingrad", "natural", "qcs", "qcs-mmse"),
    *("sparse-0.1", "ecdq-variance0.2", "ecdq-2"),
)
N = 4096


def gradient() -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(3))


def key_of(payload: torch.Tensor) -> int:
    return oracle.read_field(bytes(payload.tolist()), "key")


def test_a_seed_repeats_whatever_the_instance():
    v = gradient()
    for make in RANDOM.values():
        first, second = make(), make(seed=5)
        first.encode(v)
        assert torch.equal(first.encode(v, seed=4), second.encode(v, seed=4))
        assert not torch.equal(first.encode(v, seed=4), first.encode(v, seed=6))


def test_each_call_of_each_instance_has_its_own_key():
    v, keys = gradient(), []
    QSGD(), ALQ(parameter_bits={"a": 4}), QSGD().parts.default.second_codec(6)  # do not count
    for make in (lambda: QSGD(bits=3), lambda: QCS(), lambda: QSGD(bits=3)):
        codec = make()
        codec.step = 3  # an unused compressor beside it changes nothing
        keys += [key_of(codec.encode(v)) for _ in range(3)]
    # The first compressor's keys name no number.
    want = [(0, 0, k, Use.ENCODE) + ((n,) if n else ()) for n in range(3) for k in range(3)]
    assert keys == [oracle.stream_key(*numbers) for numbers in want]


def resumed(saved: dict) -> QSGD:
    codec = QSGD(bits=3)
    codec.load_state_dict(saved)
    return codec


def test_a_state_goes_on_with_its_stream():
    v, other, codec = gradient(), QSGD(bits=3), QSGD(bits=3)
    other.encode(v), codec.encode(v)
    saved = codec.state_dict()
    assert saved["instance"] == 1
    assert torch.equal(codec.encode(v), resumed(saved).encode(v))
    pickled = pickle.loads(pickle.dumps(codec))
    assert torch.equal(pickled.encode(v), codec.encode(v))
    instances.start_over()  # as in a new process
    again = resumed(saved)
    assert key_of(QSGD().encode(v)) == oracle.stream_key(0, 0, 0, 2**63, 2)
    assert key_of(again.encode(v)) == oracle.stream_key(0, 0, 1, 2**63, 1)


def test_settings_that_change_keep_the_stream():
    v, other, codec = gradient(), QSGD(bits=3), QSGD(bits=3)
    other.encode(v), codec.encode(v)
    codec.set(bits=5)
    saved = codec.state_dict()
    assert saved["instance"] == 1
    assert resumed(saved).state_dict()["instance"] == saved["instance"]
    assert key_of(codec.encode(v)) == oracle.stream_key(0, 0, 1, 2**63, 1)
    del saved["instance"]  # as an earlier version wrote it
    codec.load_state_dict(saved)
    assert codec._training.instance.number == 1
    assert resumed(saved)._training.instance.number is None


@pytest.mark.parametrize("bound", (False, True))
def test_ranks_agree_on_one_number(bound):
    """Their own if all have it; else one that is free on each of them, whoever needs one later."""
    ranks = [Instance(2), Instance(5)] if bound else [Instance(2), Instance(2)]
    offers = [(instance.number, free) for instance, free in zip(ranks, (7, 6), strict=True)]
    for instance in ranks:
        instances.start_over()
        instance.agree(offers)
        assert (instance.number == 2) != bound and instance.number not in (5, 6, 7)
        assert Instance().bind() == instance.number + 1
    assert ranks[0].number == ranks[1].number


def test_compressors_that_agree_at_the_same_time_have_different_numbers():
    """Workers of two optimizers have the same free numbers; ranks have bound them in any order."""
    first, second = Instance(), Instance()
    assert first.offer() == second.offer() == (0, 0)
    assert first.bind() == 0 and first.offer() == (0, 1) and second.offer() == (1, 1)
    second.bind()
    first.agree([(0, 2), (1, 3)], "generator")
    second.agree([(1, 2), (2, 3)], "discriminator")
    assert len({first.number, second.number, 0, 1, 2}) == 5


def test_no_two_uses_share_a_number():
    """``enum.unique`` sees to equal values; none meets a fusion group, at any attempt."""
    assert len({int(use) for use in Use}) == len(Use.__members__)
    groups = [group_number(i, a) for i in (0, 1, 2**32 - 1) for a in (0, 1, 2**31 - 1, 2**31)]
    assert max(groups) < min(Use) and max(Use) < 2**64
    assert len({group_number(i, a) for i in range(50) for a in range(50)}) == 2500
