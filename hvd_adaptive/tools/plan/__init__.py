"""Predict the time of a training step, compressed and not: `hvd-adaptive plan`."""
