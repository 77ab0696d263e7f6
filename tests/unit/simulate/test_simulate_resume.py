"""A compressor's state is all that a run needs to go on bit for bit, by exchange and scheme."""

from __future__ import annotations

import copy

import pytest
import torch
from states import through_disk

from hvd_adaptive import ALQ, AMQ, ECDQ, NUQSGD, QSGD, simulate

SMALL = {"bucket_size": 100, "min_numel": 50, "fusion_bytes": 8000}
REDUCE = SMALL | {"exchange": "scatter_reduce"}
WHOLE, HALF = 7, 4
CASES = {
    "alq": lambda: ALQ(update_steps=(s for s in (0, 3, 6)), **SMALL),
    "retry": lambda: ALQ(update_steps=[2, 50], **REDUCE),
    "tensors": lambda: AMQ(scope="tensor", update_steps=[0, 5], **REDUCE),
    "book": lambda: NUQSGD(coding="huffman", update_steps=[0, 5], **REDUCE),
    "ecdq": lambda: ECDQ(bits=2.0, parameter_bits={"0.weight": 3}, **REDUCE),
    "set": lambda: QSGD(schedule={2: {"bits": 4}, 5: {"exchange": "scatter_reduce"}}.get, **SMALL),
}


def make_model(case: str = "") -> torch.nn.Module:
    """Where updates are to be retried, half of the hidden units are dead: zero buckets."""
    torch.manual_seed(0)
    hidden = torch.nn.Linear(30, 40)
    if case == "retry":
        hidden.bias.data[:20] = -1e3
    return torch.nn.Sequential(hidden, torch.nn.ReLU(), torch.nn.Linear(40, 10))


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 30, generator=generator)
    return x, x[:, :10].argmax(1)


def train(model, compressor, steps, workers=3):
    simulate.train(
        model,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        compressor=compressor,
        workers=workers,
        steps=steps,
        progress=False,
    )


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.many
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one(case):
    whole, first, second = (make_model(case) for _ in range(3))
    train(whole, CASES[case](), WHOLE)
    compressor = CASES[case]()
    train(first, compressor, HALF)
    second.load_state_dict(first.state_dict())
    new = CASES[case]()
    new.load_state_dict(through_disk(compressor.state_dict()))
    train(second, new, WHOLE - HALF)
    assert torch.equal(weights(second), weights(whole))
    copied = copy.deepcopy(compressor)
    train(first, copied, WHOLE - HALF)
    assert torch.equal(weights(first), weights(whole))
    assert copied.step == new.step == WHOLE and compressor.step == HALF


def test_another_number_of_ranks_keeps_the_tables():
    """Averages of more ranks may get more bits, and then a table of their own, fitted at once."""
    old, model = CASES["tensors"](), make_model()
    train(model, old, HALF, workers=2)
    new = CASES["tensors"]()
    new.load_state_dict(through_disk(old.state_dict()))
    label = "0.weight"
    assert torch.equal(new.parts[label].levels, old.parts[label].levels)
    train(model, new, 1, workers=8)
    assert torch.equal(new.parts[label].levels, old.parts[label].levels)
    stages = [one.parts[label].second for one in (old, new)]
    assert stages[0].bits < stages[1].bits
    assert stages[1].codec.table_version == 1, "fitted before it was used"


@pytest.mark.parametrize("case", ["", "retry"])
def test_a_loaded_second_stage_waits_for_its_retry(case):
    old, model = ALQ(update_steps=[0], **REDUCE), make_model(case)
    train(model, old, HALF)
    new = ALQ(update_steps=[0], **REDUCE)
    new.load_state_dict(through_disk(old.state_dict()))
    new._training.updates.prepare_second_stages(3, [""], HALF)
    due = [s for s in range(HALF, 40) if new._training.updates.at(s).second]
    assert due == [s for s in range(HALF, 40) if old._training.updates.at(s).second]
    assert due == ([7] if case else []), "after steps 0, 1 and 3"
