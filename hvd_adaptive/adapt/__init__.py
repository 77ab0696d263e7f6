"""Collect statistics of gradients, and refit tables to them."""
