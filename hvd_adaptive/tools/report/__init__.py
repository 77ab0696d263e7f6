"""`hvd-adaptive report`: a page of a training run, made from its monitor's log.

summary computes means over a run, figures draws, page assembles the page, command is the command
line.
"""
