"""Build and install stock Horovod against the torch and MPI of this environment."""
