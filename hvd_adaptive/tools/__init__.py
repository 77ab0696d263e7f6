"""Define the `hvd-adaptive` command and what its subcommands share. No other package imports it.

=========  ============================================================================
cli        the command line of all subcommands
output     how subcommands print: a table for people, or JSON
launch     starts ranks on this machine or on others, under a time limit
methods    parses methods of exchange, "ALQ(bits=3)"
install    builds stock Horovod against this environment
doctor     checks that torch, MPI, Horovod and the kernels work together
schemes    describes every scheme
bench      measures codecs, and exchanges between ranks
plan       predicts a training step with each method
report     makes a page of a training run from its monitor's log
=========  ============================================================================
"""
