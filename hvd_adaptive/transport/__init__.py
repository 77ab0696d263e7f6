"""Collectives over Horovod, MPI and torch.distributed."""
