"""``integrations.lightning`` in the real library: fits, resumed fits, two ranks."""

from __future__ import annotations

import lightning
import pytest
import torch
import torch.nn.functional as F
from nets import flat_parameters
from torch.utils.data import DataLoader, TensorDataset
from trainer_runs import compressor, groups, network, same_everywhere

from hvd_adaptive.integrations.lightning import Compress

EPOCH = 3  # steps


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        # Of the step alone: a resumed fit need not get the batches that the first one got.
        generator = torch.Generator().manual_seed(10 * self.global_step + self.global_rank)
        inputs = torch.randn(8, 16, generator=generator)
        return F.mse_loss(self.net(inputs)[:, 0], inputs.sum(1).sin())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(callbacks, steps: int, **options) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": False, "accelerator": "cpu"} | options
    return lightning.Trainer(
        strategy="ddp_find_unused_parameters_true",
        devices=2,
        max_steps=steps,
        callbacks=callbacks,
        **quiet,
        **options,
    )


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(2 * EPOCH, 1)), batch_size=1)


def test_later_fits_continue_and_another_module_starts_anew():
    callback = Compress(compressor())
    model = Module()
    for fits in range(1, 3):
        trainer_of([callback], 2).fit(model, loader())
        assert callback.compressor.step == 2 * fits
    same_everywhere(flat_parameters(model))
    first = groups()
    for _ in range(2):
        other = Module()
        trainer_of([callback], 2).fit(other, loader())
        assert callback.compressor.step == 2
        assert groups() == first
    same_everywhere(flat_parameters(other))


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_accumulation_precision_and_a_compiled_module(precision):
    callback, model = Compress(compressor()), Module()
    trainer = trainer_of([callback], 3, accumulate_grad_batches=2, precision=precision)
    compiled = torch.compile(model, backend="aot_eager") if precision == "32-true" else model
    trainer.fit(compiled, loader())
    assert callback.compressor.step == 3
    assert 4 < callback.compressor.report()["bits_per_coordinate"] < 9
    same_everywhere(flat_parameters(model))
