"""Trainer, Lightning and Accelerate, each uninterrupted with a checkpoint half way, or resumed from
it, in forked ranks. fork_trainers.py runs one after the other. Then the recipe for Accelerate.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile

import check_accelerate
import check_lightning
import check_transformers
import recipe_accelerate
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer_runs import same_everywhere, state_of

from hvd_adaptive import ALQ
from hvd_adaptive.integrations import accelerate, transformers
from hvd_adaptive.integrations.lightning import Compress

RANKS, HALF, STEPS = 2, 3, 6


def compressor() -> ALQ:
    """With tables that are fitted before and after the checkpoint, and residuals."""
    return ALQ(bits=4, error_feedback=1.0, update_steps=(0, 4))


def trained_by_transformers(folder: str, rest: bool) -> tuple[torch.nn.Module, ALQ]:
    model, own = check_transformers.net(), compressor()
    # DDP builds its buckets anew after the first step, so a resumed run has them otherwise.
    options = {"ddp_find_unused_parameters": True, "save_strategy": "steps", "save_steps": HALF}
    trainer = check_transformers.trainer_of(model, folder, STEPS, **options)
    transformers.compress(trainer, own)
    trainer.train(
        resume_from_checkpoint=os.path.join(folder, f"checkpoint-{HALF}") if rest else None
    )
    return model, own


def trained_by_lightning(folder: str, rest: bool) -> tuple[torch.nn.Module, ALQ]:
    module, own = check_lightning.Module(), compressor()
    callbacks = [Compress(own)]
    if not rest:
        callbacks.append(ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1))
    trainer = check_lightning.trainer_of(callbacks, STEPS, enable_checkpointing=not rest)
    path = os.path.join(folder, "epoch=0.ckpt") if rest else None
    trainer.fit(module, check_lightning.loader(), ckpt_path=path)
    return module, own


def trained_by_accelerate(folder: str, rest: bool) -> tuple[torch.nn.Module, ALQ]:
    accelerator, model, optimizer = check_accelerate.make()
    own = compressor()
    accelerate.compress(accelerator, model, own)
    if rest:
        accelerator.load_state(folder)
    else:
        check_accelerate.train(accelerator, model, optimizer, range(HALF))
        accelerator.save_state(folder)
    check_accelerate.train(accelerator, model, optimizer, range(HALF, STEPS))
    return model, own


LIBRARIES = {
    "transformers": trained_by_transformers,
    "lightning": trained_by_lightning,
    "accelerate": trained_by_accelerate,
}


def work(rank: int, store: str, folder: str, rest: bool) -> None:
    """One rank."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "GROUP_RANK": 0}
    own |= {"TORCHELASTIC_RUN_ID": "fresh", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": 1}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.pop("OMPI_COMM_WORLD_RANK", None)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    for name, train in LIBRARIES.items():
        model, compressor = train(os.path.join(folder, name), rest)
        assert compressor.step == STEPS
        same_everywhere(state_of(model))
        residuals = compressor.state_dict()["residuals"]["parameters"]
        values = torch.cat([state_of(model), *(residuals[key] for key in sorted(residuals))])
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        part = "rest" if rest else "whole"
        os.write(1, f"\n{part} {name} rank={rank} hash={digest}\n".encode())  # in one piece
    if not rest:
        recipe_accelerate.main(60)
        sys.stdout.flush()


def main(folder: str, part: str) -> int:
    """Fork the ranks; 0 if all ended well."""
    children = []
    with tempfile.TemporaryDirectory() as place:
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                try:
                    work(rank, os.path.join(place, "store"), folder, part == "rest")
                    os._exit(0)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            children.append(child)
        ends = [os.waitpid(child, 0)[1] for child in children]
    return int(any(ends))
