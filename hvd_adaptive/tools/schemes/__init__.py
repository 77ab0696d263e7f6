"""`hvd-adaptive schemes`: every scheme with its paper, parameters, bits, error and bounds.

outline reads the schemes' documentation, catalog measures them, command is the command line.
"""
