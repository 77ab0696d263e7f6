"""Build and install stock Horovod against the torch and MPI of this environment.

Horovod's sdist sets an older C++ standard than today's torch headers accept, so it no longer
installs by itself. A small compiler wrapper raises the standard; Horovod's source stays as it is.
"""
