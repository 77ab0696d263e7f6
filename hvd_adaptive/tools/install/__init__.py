"""Build and install stock Horovod against the torch and MPI of this environment.

Horovod's sdist sets an older C++ standard than today's torch headers accept, so it no longer
installs by itself. Nothing in Horovod is changed: a small compiler wrapper raises the standard.

`install.install` runs all steps in order. Each module beside it has one task:

=============  ===========================================================
preflight      check for a compiler and Python headers (stand-alone)
torch_facts    find torch and the C++ standard that its headers need
mpi            find MPI
cuda           find CUDA and NCCL, if any
wrapper        write the compiler wrapper
plan           plan the command, its environment and the result's key
cache          keep built wheels
build          run the command, show its progress
verify         check that the installed Horovod imports and has the features
diagnose       find the fault, and what to install
command        define the `hvd-adaptive install-horovod` command line
=============  ===========================================================
"""
