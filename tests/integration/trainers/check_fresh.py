"""Trainer, Lightning and Accelerate: a training with a checkpoint half way (PART=whole), and one
that new processes resume from it (PART=rest), which repeats the former in all bits."""

from __future__ import annotations

import os
from pathlib import Path

import check_accelerate
import check_lightning
import check_transformers
import pytest
import recipe_accelerate
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from recipe_results import check_recipe
from trainer_runs import same_everywhere, state_of

from hvd_adaptive import ALQ
from hvd_adaptive.integrations import accelerate, transformers
from hvd_adaptive.integrations.lightning import Compress

HALF, STEPS = 3, 6
RESUMES = os.environ["PART"] == "rest"


def trained_by_transformers(own: ALQ, folder: str) -> torch.nn.Module:
    model, checkpoint = check_transformers.net(), os.path.join(folder, f"checkpoint-{HALF}")
    # DDP builds its buckets anew after the first step, so a resumed run has them otherwise.
    options = {"ddp_find_unused_parameters": True, "save_strategy": "steps", "save_steps": HALF}
    trainer = check_transformers.trainer_of(model, folder, STEPS, **options)
    transformers.compress(trainer, own)
    trainer.train(resume_from_checkpoint=checkpoint if RESUMES else None)
    return model


def trained_by_lightning(own: ALQ, folder: str) -> torch.nn.Module:
    module, callbacks = check_lightning.Module(), [Compress(own)]
    if not RESUMES:
        callbacks.append(ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1))
    trainer = check_lightning.trainer_of(callbacks, STEPS, enable_checkpointing=not RESUMES)
    path = os.path.join(folder, "epoch=0.ckpt") if RESUMES else None
    trainer.fit(module, check_lightning.loader(), ckpt_path=path)
    return module


def trained_by_accelerate(own: ALQ, folder: str) -> torch.nn.Module:
    accelerator, model, optimizer = check_accelerate.make()
    accelerate.compress(accelerator, model, own)
    if RESUMES:
        accelerator.load_state(folder)
    else:
        check_accelerate.train(accelerator, model, optimizer, range(HALF))
        accelerator.save_state(folder)
    check_accelerate.train(accelerator, model, optimizer, range(HALF, STEPS))
    return model


@pytest.mark.parametrize(
    "train", [trained_by_transformers, trained_by_lightning, trained_by_accelerate]
)
def test_new_processes_repeat_the_uninterrupted_training(train):
    """Parameters and residuals, with tables that are fitted before and after the checkpoint."""
    folder = os.path.join(os.environ["RUNS"], train.__name__)
    own = ALQ(bits=4, error_feedback=1.0, update_steps=(0, 4))
    model = train(own, folder)
    assert own.step == STEPS
    same_everywhere(state_of(model))
    residuals = own.state_dict()["residuals"]["parameters"]
    values = torch.cat([state_of(model), *(residuals[name] for name in sorted(residuals))])
    kept = Path(folder, f"rank{dist.get_rank()}.pt")
    if RESUMES:
        assert torch.equal(torch.load(kept), values)
    else:
        torch.save(values, kept)


@pytest.mark.skipif(RESUMES, reason="once is enough")
def test_the_recipe_for_accelerate(capfd):
    is_first = dist.get_rank() == 0
    recipe_accelerate.main(60)  # which ends the process group
    if is_first:
        check_recipe("accelerate", capfd.readouterr().out)
