"""Predict the time of a training step, compressed and not: `hvd-adaptive plan`.

command is the command line, model the formulas, measure the constants of this machine, worker
the program of its ranks, text the printed table and formula.
"""
