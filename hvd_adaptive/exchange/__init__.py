"""Collectives over Horovod; the only package, with fusion, that touches it."""
