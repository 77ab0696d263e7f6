"""`hvd-adaptive plan`: predicts the time of a training step, compressed and not.

command is the command line; model, the formulas and the advice (pure functions); measure, what is
measured on this machine; worker, the program of its ranks.
"""
