"""Measure codecs on this machine, and exchanges between ranks: `hvd-adaptive bench`."""
