"""Perform collectives over Horovod, MPI and torch.distributed."""
