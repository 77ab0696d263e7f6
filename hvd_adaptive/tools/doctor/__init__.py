"""`hvd-adaptive doctor`: checks that the installed programs work together, and says what to do.

checks examines the environment, worker runs on two ranks, command is the command line.
"""
