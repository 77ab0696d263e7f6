"""Where frameworks call in: Horovod's optimizers and DDP's communication hooks."""
