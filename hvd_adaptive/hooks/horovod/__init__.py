"""Turn Horovod's calls of compress and decompress, one for each gradient, into steps."""
