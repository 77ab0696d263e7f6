"""A quantiser: bodies and payloads, without ranks or Horovod."""
