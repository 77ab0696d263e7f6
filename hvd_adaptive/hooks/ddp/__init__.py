"""From DistributedDataParallel's buckets to steps."""
