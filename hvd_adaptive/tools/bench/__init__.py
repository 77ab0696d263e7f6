"""Measure codecs on this machine, and exchanges between ranks: `hvd-adaptive bench`.

=========  ============================================================================
codec      encode and decode of every scheme against memcpy
exchange   one exchange of a model's gradients, by stock Horovod and by schemes
worker     the program of each rank of an exchange
backward   a backward pass that costs nothing
gradients  gradients made from random numbers
models     sizes of well-known models
command    the command line
=========  ============================================================================
"""
