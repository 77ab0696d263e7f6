"""``integrations.transformers`` in the real library: a tiny model, real checkpoints, two ranks."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from nets import flat_parameters
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainer_runs import groups, same_everywhere, shared_folder
from transformers import Trainer, TrainerCallback, TrainingArguments

from hvd_adaptive import ALQ, QSGD, LocalSGD
from hvd_adaptive.integrations.transformers import compress

STEPS = 4


class Net(nn.Module):
    """Two layers, and the loss that Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 256), nn.Linear(256, 1)
        self.fail_at: int | None = None

    def forward(self, inputs, labels=None):
        if self.training and self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise RuntimeError("CUDA out of memory.")
        output = self.last(torch.tanh(self.first(inputs))).squeeze(-1)
        return {"loss": ((output - labels) ** 2).mean(), "logits": output}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def trainer_of(
    model, folder, steps=STEPS, optimizers=(None, None), model_init=None, **options
) -> Trainer:
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    rows = [{"inputs": row, "labels": row.sum().sin()} for row in inputs]
    arguments = {"learning_rate": 1e-2, "report_to": [], "per_device_train_batch_size": 4}
    arguments |= {"save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    arguments |= {"max_steps": steps, "use_cpu": True, "lr_scheduler_type": "constant"}
    settings = TrainingArguments(str(folder), **arguments | options)
    own = {"train_dataset": rows, "eval_dataset": rows[:8], "optimizers": optimizers}
    return Trainer(model, settings, model_init=model_init, **own)


def test_further_trainings_of_the_same_module_continue():
    """A second Trainer wraps the module in a new DDP model; the compressor goes on with it."""
    model, compressor = net(), ALQ(bits=3, error_feedback=1.0)
    with shared_folder() as folder:
        trainer = trainer_of(model, folder)
        compress(trainer, compressor)
        callback = trainer.callback_handler.callbacks[-1]
        for _ in range(2):
            trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert compressor.step == 2 * STEPS
        assert 3 < compressor.report()["bits_per_coordinate"] < 8
        callback._trainer = trainer_of(model, folder)
        callback._trainer.add_callback(callback)
        callback._trainer.train()
    assert compressor.step == 3 * STEPS
    same_everywhere(flat_parameters(model))


def test_a_training_resumes_in_the_same_process():
    with shared_folder() as folder:
        model, compressor = net(), ALQ(bits=3, error_feedback=1.0)
        trainer = trainer_of(model, folder, 6, save_strategy="steps", save_steps=2)
        compress(trainer, compressor)
        trainer.train()
        seen: list[int] = []

        class Watch(TrainerCallback):
            def on_step_begin(self, *arguments, **others):
                seen.append(compressor.step)

        trainer.add_callback(Watch())
        trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
        assert seen == [2, 3, 4, 5]
        assert compressor.step == 6
        last = trainer.train(resume_from_checkpoint=True)
        assert compressor.step == last.global_step >= 6
        same_everywhere(flat_parameters(model))


def test_a_checkpoint_without_a_compressor_warns(caplog):
    with shared_folder() as folder:
        trainer_of(net(), folder, 4, save_strategy="steps", save_steps=2).train()
        compressor = ALQ(bits=3)
        trainer = trainer_of(net(), folder, 4)
        compress(trainer, compressor)
        with caplog.at_level(logging.WARNING, logger="hvd_adaptive"):
            trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
        assert compressor.step == 2
    assert "checkpoint-2 has no state of a compressor" in caplog.text


@pytest.mark.parametrize("before", [0, 2])
def test_auto_find_batch_size_tries_again(before):
    """All ranks run out of memory, before their first step or later; the retry is compressed."""
    model, compressor = net(), ALQ(bits=3, error_feedback=1.0)
    model.fail_at = before
    with shared_folder() as folder:
        trainer = trainer_of(model, folder, auto_find_batch_size=True)
        compress(trainer, compressor)
        trainer.train()
    assert model.fail_at is None
    assert trainer.state.train_batch_size < 4
    assert compressor.step == before + STEPS
    same_everywhere(flat_parameters(model))


def test_bf16_a_compiled_model_accumulation_and_the_best_model():
    """A step of two batches is compressed once; the best model is loaded at the end."""
    model, compressor = net(), ALQ(bits=4)
    options = {"bf16": True, "torch_compile": True, "torch_compile_backend": "aot_eager"}
    options |= {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    options |= {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    with shared_folder() as folder:
        trainer = trainer_of(model, folder, **options)
        compress(trainer, compressor)
        trainer.train()
        assert trainer.state.best_model_checkpoint
    assert compressor.step == STEPS
    assert 4 < compressor.report()["bits_per_coordinate"] < 9
    same_everywhere(flat_parameters(model))


def test_lora_compresses_the_adapters_alone():
    model, compressor = net(), QSGD(bits=4, min_numel=1, error_feedback=1.0)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["first"]))
    frozen = flat_parameters(model.last)
    with shared_folder() as folder:
        trainer = trainer_of(adapted, folder, save_strategy="steps", save_steps=2)
        compress(trainer, compressor)
        trainer.train()
        trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
    assert compressor.step == STEPS
    assert compressor.report()["coordinates"] == 4 * (16 + 256)
    assert torch.equal(flat_parameters(model.last), frozen)
    same_everywhere(flat_parameters(adapted))


def test_models_of_a_search_start_anew():
    """With ``model_init`` every training has another model, tables and residuals of its own."""
    with shared_folder() as folder:
        compressor = QSGD(bits=4, error_feedback=1.0)
        trainer = trainer_of(None, folder, model_init=net, save_strategy="steps", save_steps=2)
        compress(trainer, compressor)
        trainer.train()
        first, before = flat_parameters(trainer.model), groups()
        trainer.train()
        assert compressor.step == STEPS
        assert torch.equal(flat_parameters(trainer.model), first)
        assert groups() == before
        trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
        trainer.train()  # does not continue with what the resumed training had loaded
        assert compressor.step == STEPS
        assert torch.equal(flat_parameters(trainer.model), first)
    same_everywhere(first)


def test_a_trainer_accepts_local_sgd_and_warns(caplog):
    """Trainer wraps the model in DDP, which averages at every step."""
    model = net()
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    with shared_folder() as folder, caplog.at_level(logging.WARNING, logger="hvd_adaptive"):
        trainer_of(model, folder, optimizers=(optimizer, schedule)).train()
    assert optimizer.rounds == STEPS // 2
    assert "moved their parameters in the same way" in caplog.text
    same_everywhere(flat_parameters(model))
