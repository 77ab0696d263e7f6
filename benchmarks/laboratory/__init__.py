"""Hosts at a given network rate on one machine, and the exchange of gradients timed on them."""
