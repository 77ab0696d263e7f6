"""Make a page of a training run from its monitor's log: `hvd-adaptive report`.

summary computes means over a run, figures draws, page assembles the page, command is the command
line.
"""
