"""`hvd-adaptive plan`: predicts the time of a training step, compressed and not.

command is the command line. quantities declares the model's input and output. measure measures
constants on this machine, worker runs on its ranks, steps measures whole steps, kept stores the
constants in a file. model predicts from constants (pure functions, and the formulas), advice
recommends a method.
"""
