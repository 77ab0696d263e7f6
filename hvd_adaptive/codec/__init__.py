"""Quantise bodies and payloads, without ranks or Horovod."""
