"""`hvd-adaptive plan`: what a training step would take, compressed and not, before it is tried.

model predicts from constants (pure functions, and the formulas), measure finds the constants on
this machine, worker runs on its ranks, advice chooses, command is the command line.
"""
