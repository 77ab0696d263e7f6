"""Check that the installed programs work together: `hvd-adaptive doctor`.

checks examines the environment, worker runs on two ranks, command is the command line.
"""
