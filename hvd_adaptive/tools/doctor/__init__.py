"""Check that the installed programs work together: `hvd-adaptive doctor`.

command has the checks and the command line, worker runs on two ranks.
"""
