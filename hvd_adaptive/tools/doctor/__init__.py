"""`hvd-adaptive doctor`: does everything here go together, and what to do where not.

checks looks at the environment, worker runs on two ranks, command is the command line.
"""
