"""Trainer, Lightning and Accelerate in float16: a training with a checkpoint half way (PART=whole),
and one that new processes resume from it (PART=rest), which repeats the former in all bits."""

from __future__ import annotations

import os
from pathlib import Path

import check_accelerate
import check_lightning
import check_transformers
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from nets import flat_parameters
from trainer_runs import SCALE, same_everywhere, scaler, with_fp16
from transformers import TrainerCallback

from hvd_adaptive import ALQ
from hvd_adaptive.integrations import accelerate, transformers
from hvd_adaptive.integrations.lightning import Compress

HALF, STEPS, OVERFLOWS = 3, 6, 1  # on rank 0, in this step
RESUMES = os.environ["PART"] == "rest"
After = list[tuple[torch.Tensor, float]]  # parameters and the loss scale after each step


class Net(check_transformers.Net):
    forwards = 0

    def forward(self, inputs, labels=None):
        found = super().forward(inputs, labels)
        overflows = dist.get_rank() == 0 and self.forwards == OVERFLOWS and not RESUMES
        self.forwards += 1
        return found | {"loss": found["loss"] * torch.inf} if overflows else found


def trained_by_transformers(own: ALQ, folder: str, after: After) -> None:
    class Watch(TrainerCallback):
        def on_step_end(self, *arguments, model, **others):
            after.append((flat_parameters(model), trainer.accelerator.scaler.get_scale()))

    torch.manual_seed(0)
    # DDP builds its buckets anew after the first step, so a resumed run has them otherwise.
    options = {"ddp_find_unused_parameters": True, "save_strategy": "steps", "save_steps": HALF}
    trainer = check_transformers.trainer_of(Net(), folder, STEPS, fp16=True, **options)
    transformers.compress(trainer, own)
    with_fp16(trainer.accelerator)
    trainer.add_callback(Watch())
    checkpoint = os.path.join(folder, f"checkpoint-{HALF}")
    trainer.train(resume_from_checkpoint=checkpoint if RESUMES else None)


def trained_by_lightning(own: ALQ, folder: str, after: After) -> None:
    class Module(check_lightning.Module):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            overflows = self.global_rank == 0 and self.global_step == OVERFLOWS
            return loss * torch.inf if overflows else loss

        def on_train_batch_end(self, outputs, batch, index):
            after.append((flat_parameters(self), precision.scaler.get_scale()))

    callbacks, precision = [Compress(own)], MixedPrecision("16-mixed", "cpu", scaler())
    if not RESUMES:
        callbacks.append(ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1))
    options = {"enable_checkpointing": not RESUMES, "plugins": [precision]}
    path = os.path.join(folder, "epoch=0.ckpt") if RESUMES else None
    trainer = check_lightning.trainer_of(callbacks, STEPS, **options)
    trainer.fit(Module(), check_lightning.loader(), ckpt_path=path)


def trained_by_accelerate(own: ALQ, folder: str, after: After) -> None:
    accelerator, model, optimizer = check_accelerate.make(mixed_precision="fp16")
    accelerate.compress(accelerator, model, own)
    if RESUMES:
        accelerator.load_state(folder)
    for step in range(HALF if RESUMES else 0, STEPS):
        if step == HALF and not RESUMES:
            accelerator.save_state(folder)
        check_accelerate.train(accelerator, model, optimizer, [step], OVERFLOWS)
        assert optimizer.step_was_skipped == (step == OVERFLOWS)
        after.append((flat_parameters(model), accelerator.scaler.get_scale()))


@pytest.mark.parametrize(
    "train", [trained_by_transformers, trained_by_lightning, trained_by_accelerate]
)
def test_new_processes_repeat_the_uninterrupted_training(train):
    """The step that overflows moves nothing; residuals follow the scale; tables are fitted before
    and after the checkpoint."""
    AcceleratorState._reset_state()  # Accelerate keeps one precision for the process
    folder, after = os.path.join(os.environ["RUNS"], train.__name__), []
    own = ALQ(bits=4, error_feedback=1.0, update_steps=(0, 4))
    train(own, folder, after)
    assert own.step == STEPS
    parameters = [found for found, _ in after]
    same_everywhere(parameters[-1])
    residuals = own.state_dict()["residuals"]["parameters"]
    # Not scaled, as gradients whose coordinates are below 1.
    assert 0 < max(float(residual.abs().max()) for residual in residuals.values()) < 1
    values = torch.cat([parameters[-1], *(residuals[name] for name in sorted(residuals))])
    kept, scales = Path(folder, f"rank{dist.get_rank()}.pt"), [scale for _, scale in after]
    if RESUMES:
        assert scales == [SCALE / 2] * (STEPS - HALF)
        assert torch.equal(torch.load(kept), values)
    else:
        assert scales == [SCALE] + [SCALE / 2] * (STEPS - 1)
        assert torch.equal(parameters[0], parameters[1])
        assert not torch.equal(parameters[1], parameters[2])
        torch.save(values, kept)
