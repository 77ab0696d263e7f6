"""`hvd-adaptive plan`: what a training step would take, compressed and not, before it is tried.

command is the command line; quantities names what goes in and comes out. measure finds constants on
this machine, worker runs on its ranks, steps measures whole steps, kept keeps it all in a file.
model predicts from constants (pure functions, and the formulas), advice chooses.
"""
