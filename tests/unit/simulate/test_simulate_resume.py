"""Second stages of a run that goes on; test_reachable_states.py resumes every kind of run."""

from __future__ import annotations

import pytest
import torch
from states import through_disk

from hvd_adaptive import ALQ, AMQ, simulate

KEYWORDS = {"bucket_size": 100, "min_numel": 50, "fusion_bytes": 8000, "exchange": "scatter_reduce"}
STEPS = 4


def make_model(is_half_dead: bool = False) -> torch.nn.Module:
    """half dead: buckets of zeros, for which updates are to be retried."""
    torch.manual_seed(0)
    hidden = torch.nn.Linear(30, 40)
    if is_half_dead:
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


def loaded(make, old):
    new = make()
    new.load_state_dict(through_disk(old.state_dict()))
    return new


def test_another_number_of_ranks_keeps_the_tables():
    """Averages of more ranks may get more bits, and then a table of their own, fitted at once."""

    def make():
        return AMQ(scope="tensor", update_steps=[0, 5], **KEYWORDS)

    old, model, label = make(), make_model(), "0.weight"
    train(model, old, STEPS, workers=2)
    new = loaded(make, old)
    train(model, new, 1, workers=8)
    assert torch.equal(new.parts[label].levels, old.parts[label].levels)
    stages = [one.parts[label].second for one in (old, new)]
    assert stages[0].bits < stages[1].bits
    assert stages[1].codec.table_version == 1, "fitted before it was used"


@pytest.mark.parametrize("is_half_dead", [False, True])
def test_a_loaded_second_stage_waits_for_its_retry(is_half_dead):
    def make():
        return ALQ(update_steps=[0], **KEYWORDS)

    old = make()
    train(make_model(is_half_dead), old, STEPS)
    new = loaded(make, old)
    new._training.updates.prepare_second_stages((3,), [""], STEPS)
    due = [s for s in range(STEPS, 40) if new._training.updates.at(s).second]
    assert due == [s for s in range(STEPS, 40) if old._training.updates.at(s).second]
    assert due == ([7] if is_half_dead else []), "after steps 0, 1 and 3"
