"""From Horovod's calls, one gradient at a time, to fusion groups that are exchanged as payloads."""
