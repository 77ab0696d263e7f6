"""Compress the gradients of a Hugging Face Trainer.

trainer = Trainer(model, arguments, train_dataset=examples)
compress(trainer, ALQ(bits=3))
trainer.train()
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.integrations.attachment import Attachment


def compress(trainer: Trainer, compressor: GradientCompressor) -> None:
    """Compress the gradients of all trainings of ``trainer``.

    Checkpoints also contain a file of the compressor's state for each rank, which
    ``trainer.train(resume_from_checkpoint=...)`` loads. With one process, and with DeepSpeed and
    FSDP, nothing is compressed.

    Args:
        trainer: The trainer, or that of a subclass.
        compressor: A compressor that serves nothing else.

    Raises:
        ValueError: ``compressor`` is not a compressor.
    """
    callback = _Callback(trainer, Attachment(compressor))
    trainer.add_callback(callback)
    train = trainer.train

    @functools.wraps(train)
    def resumable(resume_from_checkpoint: Any = None, *others: Any, **keywords: Any) -> Any:
        callback.checkpoint = resume_from_checkpoint
        return train(resume_from_checkpoint, *others, **keywords)

    trainer.train = resumable


class _Callback(TrainerCallback):
    """Attach the compressor when a training begins, and save its state with checkpoints."""

    def __init__(self, trainer: Trainer, attachment: Attachment) -> None:
        self._trainer, self._attachment = trainer, attachment
        self.checkpoint: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Attach the compressor; load its state if the training is resumed."""
        self._attachment.scaler = self._trainer.accelerator.scaler
        self._attachment.attach(self._trainer.model_wrapped)
        checkpoint = self.checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(args.output_dir)
        if checkpoint:
            self._attachment.load(checkpoint)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the compressor's state beside the model's."""
        if not args.save_only_model:
            run = getattr(self._trainer, "_get_output_dir", lambda trial: args.output_dir)
            folder = Path(run(trial=None)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._attachment.save(folder)
