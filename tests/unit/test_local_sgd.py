"""LocalSGD on one rank, and its errors; tests/parallel has several ranks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from local_rounds import OUTER, check_simulation
from streaming_simulation import backward, make_net, make_optimizer
from torch import nn

from hvd_adaptive import ALQ, LocalSGD
from hvd_adaptive.hooks import local_checks
from hvd_adaptive.hooks.local_round import Pending
from hvd_adaptive.hooks.rounds import Background


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("case", ["whole", "whole and delayed", "until the next"])
def test_one_rank_takes_outer_steps(case, outer):
    """And sends nothing, so its compressor quantises nothing; the rest is a round of its own."""
    optimizer = check_simulation(0, [14], case, outer=outer, compression=ALQ(bits=3))
    rounds = optimizer.rounds
    optimizer.finish()
    report = optimizer.report()
    assert optimizer.rounds == report["rounds"] == rounds and report["wire_bytes_per_step"] == 0


def made(**keywords) -> LocalSGD:
    """After three steps."""
    net = make_net()
    optimizer = LocalSGD(make_optimizer(net), every=4, **keywords)
    for step in range(3):
        backward(net, 0, step)
        optimizer.step()
    return optimizer


def without(state: dict, name: str) -> dict:
    return {other: value for other, value in state.items() if other != name}


def assert_refused(load, state: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load(state)


def test_states_of_other_fragments_are_refused():
    optimizer = made(fragments=2, delay=2)
    state = optimizer.state_dict()
    pending, load = state["pending"], optimizer.load_from
    assert pending["steps"] == 1
    assert_refused(made().load_state_dict, state, "must be a list for fragments=1")
    for name in pending:
        broken = state | {"pending": without(pending, name)}
        assert_refused(load, broken, f"state: pending: has no entry '{name}'")
    broken = state | {"pending": pending | {"ways": [torch.zeros(3), *pending["ways"][1:]]}}
    assert_refused(optimizer.load_state_dict, broken, "lost, or of several ranks")
    assert_refused(load, broken, "pending: ways are not those")
    assert_refused(load, state | {"fragments": [2, *state["fragments"][1:]]}, "fragments")


def test_states_of_others_are_refused():
    net = make_net()
    net[2].requires_grad_(False)
    optimizer = LocalSGD(make_optimizer(net), every=3)
    state, load = optimizer.state_dict(), optimizer.load_state_dict
    assert [slot for slot, anchor in enumerate(state["anchors"]) if anchor is None] == [2, 3]
    load(state)
    for name in state:
        assert_refused(load, without(state, name), f"no entry '{name}'")
    small = LocalSGD(torch.optim.SGD(nn.Linear(2, 2).parameters()), every=3)
    assert_refused(small.load_state_dict, state, "anchors")
    other = LocalSGD(make_optimizer(net), every=3, compression=ALQ(bits=3))
    assert_refused(other.load_state_dict, state, "compressor")
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert_refused(load, state, "anchors")


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"every": 0}, "every"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"lr": 0}, "lr=0"),
        ({"compression": ALQ}, "compression=ALQ"),
        ({"process_set": 1, "process_group": 2}, "give one of them"),
        ({"fragments": 3}, "fragments=3: must be an integer from 1 to 2"),
        ({"every": 9, "fragments": 7}, "fragments=7: must be at most .* before layers are frozen"),
        ({"every": 5, "fragments": 2, "delay": 3}, "delay=3: must be an integer from 0 to 2"),
        ({"delay": 1, "mixing": 1.0}, "mixing=1.0"),
        ({"mixing": 0.5}, "mixing=0.5: needs a delay"),
        ({"compression": ALQ(bits=3, parameter_bits={"*": 4})}, "give LocalSGD named_parameters="),
    ],
)
def test_wrong_arguments(keywords, told):
    with pytest.raises(ValueError, match=told):
        LocalSGD(make_optimizer(make_net()), **{"every": 2} | keywords)


def test_an_unknown_keyword():
    with pytest.raises(TypeError, match="no keyword 'compressor'; did you mean 'compression'"):
        LocalSGD(make_optimizer(make_net()), every=2, compressor=ALQ(bits=3))  # type: ignore[arg-type]


def test_wrong_optimizers():
    for wrong, told in (
        (make_net(), r"Sequential\("),
        ("sgd", "'sgd'"),
        (torch.optim.SGD, "<class"),
    ):
        with pytest.raises(ValueError, match=f"optimizer={told}") as raised:
            LocalSGD(wrong, every=2)
        assert str(raised.value).endswith(": must be a torch optimizer")
    with pytest.raises(ValueError, match="complex"):
        numbers = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        LocalSGD(torch.optim.SGD([numbers]), every=2)


def test_it_is_an_optimizer_for_schedulers_and_hooks():
    net = make_net()
    inner = make_optimizer(net)
    optimizer, called = LocalSGD(inner, every=2), []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_post_hook(lambda *of: called.append("step"))
    optimizer.register_state_dict_post_hook(lambda *of: called.append("state"))
    for step in range(3):
        backward(net, 0, step)
        optimizer.step()
        schedule.step()
    assert inner.param_groups[0]["lr"] == 0.1 / 8 and called == ["step"] * 3
    inner.load_state_dict(inner.state_dict())  # replaces its groups and its state
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    assert optimizer.defaults == inner.defaults
    optimizer.param_groups[0]["lr"] = 1.0
    assert inner.param_groups[0]["lr"] == 1.0 and "state" in called


def test_copies_are_refused():
    optimizer = LocalSGD(make_optimizer(make_net()), every=2)
    for act in (copy.deepcopy, copy.copy, lambda one: torch.save(one, io.BytesIO())):
        with pytest.raises(TypeError, match="LocalSGD cannot be copied"):
            act(optimizer)
    with pytest.raises(ValueError, match="must not be a LocalSGD"):
        LocalSGD(optimizer, every=2)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_gives_the_same_bits(unscaled, fused):
    """Of the optimizer with the scaler; an overflow counts as a step of the round."""

    def trained(local: bool) -> list[torch.Tensor]:
        net = make_net()
        inner = torch.optim.Adam(net.parameters(), lr=0.01, fused=fused)
        optimizer = LocalSGD(inner, every=6) if local else inner
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            backward(net, 0, step, scaler)
            if step == 2:
                net[4].bias.grad[0] = float("nan")
            if unscaled:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        if local:
            assert optimizer.rounds == 0
            optimizer.skip()
            assert optimizer.rounds == 0
            optimizer.skip()
            assert optimizer.rounds == 1
        return [p.detach() for p in net.parameters()]

    for a, b in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(a, b)


def test_ranks_that_appear_later(monkeypatch):
    """A rank that was alone at first does not remain so silently."""
    net = make_net()
    optimizer = LocalSGD(make_optimizer(net), every=1)
    optimizer.step()
    monkeypatch.setattr(local_checks, "rank_and_size", lambda: (0, 2))
    with pytest.raises(RuntimeError, match=r"there are 2 now: construct it after"):
        optimizer.step()


def test_a_round_that_fails_with_its_ranks_is_left_out():
    """As when elastic Horovod's workers change: what was learned is averaged later."""
    net = make_net()
    optimizer = LocalSGD(make_optimizer(net), every=2, fragments=2, delay=1)
    backward(net, 0, 0)
    optimizer.step()

    def fail() -> None:
        raise RuntimeError("the ranks have changed")

    optimizer._pending = Pending(Background(fail, torch.device("cpu"), "fails"), 1)
    with pytest.raises(RuntimeError, match="have changed"):
        optimizer.state_dict()
    optimizer.connect()
    assert optimizer.state_dict()["moved"] == [True, True]
    backward(net, 0, 1)
    optimizer.step()
    optimizer.finish()
    assert optimizer.rounds > 0
