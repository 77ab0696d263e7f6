"""List every scheme with its paper, parameters, bits, error and bounds: `hvd-adaptive schemes`.

outline reads the schemes' documentation, catalog measures them, command is the command line.
"""
