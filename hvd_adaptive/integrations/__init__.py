"""Connect compressors to trainers: Hugging Face's Trainer, Accelerate and PyTorch Lightning.

Each module imports its library, and is imported by itself, such as
``from hvd_adaptive.integrations.transformers import compress``. All of them use the hook of
``hvd_adaptive.ddp``.
"""
