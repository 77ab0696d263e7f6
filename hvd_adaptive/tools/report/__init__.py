"""Make a page of a training run from its monitor's log: `hvd-adaptive report`.

summary computes means over a run, page draws the page, command is the command line.
"""
