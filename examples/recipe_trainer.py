"""Hugging Face Trainer: a small GPT-2 on Python's help texts, character by character.

torchrun --nproc-per-node 2 examples/recipe_trainer.py
"""

from __future__ import annotations

import sys
from pydoc_data import topics
from tempfile import TemporaryDirectory

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hvd_adaptive import ALQ
from hvd_adaptive.integrations.transformers import compress

LENGTH = 64


def main(steps: int) -> None:
    """Train, and print losses and the size of codes."""
    text = torch.tensor(list("\n".join(topics.topics.values()).encode()))
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    examples = [{"input_ids": row, "labels": row} for row in rows]
    size = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 128, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None))
    with TemporaryDirectory() as folder:
        options = {"max_steps": steps, "learning_rate": 3e-3, "logging_steps": 10, "report_to": []}
        arguments = TrainingArguments(folder, use_cpu=not torch.cuda.is_available(), **options)
        trainer = Trainer(model, arguments, train_dataset=examples)
        compressor = ALQ(bits=3)
        compress(trainer, compressor)  # the new line
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
        print(f"{compressor.report()['bits_per_coordinate']:.2f} bits per coordinate")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
