"""Compress the gradients of a training loop with Accelerate.

model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
compress(accelerator, model, ALQ(bits=3))
"""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn

from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.integrations.attachment import Attachment


def compress(
    accelerator: Accelerator, model: nn.Module, compressor: GradientCompressor
) -> Attachment:
    """Compress the gradients of a model that ``accelerator.prepare`` has returned.

    ``accelerator.save_state`` also writes a file of the compressor's state for each rank, which
    ``accelerator.load_state`` reads. With one process nothing is compressed.

    Args:
        accelerator: The accelerator.
        model: The prepared model.
        compressor: A compressor that serves nothing else.

    Returns:
        An object whose ``attach(model)`` continues with a model that was prepared again.

    Raises:
        ValueError: ``compressor`` is not a compressor, or serves another model.
    """
    attachment = Attachment(compressor)
    attachment.scaler = accelerator.scaler
    attachment.attach(model)
    save, load = attachment.save, attachment.load
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: save(folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: load(folder))
    return attachment
