"""Measure codecs on this machine, and exchanges between ranks: `hvd-adaptive bench`.

=========  ============================================================================
codec      encode and decode of every scheme against memcpy
worker     the program of each rank of an exchange
backward   a backward pass that costs nothing, and gradients made from random numbers
models     sizes of well-known models
command    the command line
=========  ============================================================================
"""
