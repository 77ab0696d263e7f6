"""`hvd-adaptive schemes`: every scheme with its paper, parameters, bits, error and bounds.

catalog describes the schemes, command is the command line.
"""
