"""From Horovod's calls of compress and decompress, one gradient at a time, to steps."""
