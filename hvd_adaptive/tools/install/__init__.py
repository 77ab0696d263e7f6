"""Builds and installs stock Horovod against the torch and MPI that are already here.

Horovod's sdist asks for an older C++ standard than today's torch headers accept, so it no longer
installs by itself. Nothing in Horovod is changed: a small compiler wrapper raises the standard.

`install.install` is the whole way, in order; the modules beside it each answer one question:

=============  ===========================================================
preflight      is there a compiler, are there Python headers? (stand-alone)
torch_facts    which torch, and which C++ standard do its headers need?
mpi            which MPI?
cuda           which CUDA and NCCL, if any?
wrapper        the compiler wrapper
plan           the command, its environment and the key of the result
cache          where built wheels are kept
build          run the command, show how far it is
verify         does the installed Horovod import, and can it do what was asked?
diagnose       what went wrong, and what to install
command        the `hvd-adaptive install-horovod` command line
=============  ===========================================================
"""
