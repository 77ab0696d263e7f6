"""Predict the time of a training step, compressed and not: `hvd-adaptive plan`.

command is the command line, which starts two ranks that measure this machine (worker), model the
formulas, text the printed table and formula.
"""
