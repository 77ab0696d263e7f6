"""Predict the time of a training step, compressed and not: `hvd-adaptive plan`.

command is the command line and the printed plan, model the formulas, measure the constants of this
machine, worker the program of its ranks.
"""
