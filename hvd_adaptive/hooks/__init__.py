"""Serve frameworks: Horovod's optimizers, DDP's communication hooks, FSDP2 and loops."""
