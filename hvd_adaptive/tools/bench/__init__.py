"""`hvd-adaptive bench`: how fast the codecs are on this machine, and exchanges between ranks.

=========  ============================================================================
codec      encode and decode of every scheme against memcpy
exchange   one exchange of a model's gradients, by stock Horovod and by schemes
worker     what runs on each rank of the latter
ranks      starts ranks on this machine or on others, under a time limit
backward   a backward pass that costs nothing
models     how large well-known models are
command    the command line
=========  ============================================================================
"""
