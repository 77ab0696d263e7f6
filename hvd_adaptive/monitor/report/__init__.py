"""`hvd-adaptive report`: a page of a training run, made from its monitor's log.

figures draws, page puts everything together, command is the command line.
"""
