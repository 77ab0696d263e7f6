"""Subcommands of `hvd-adaptive` that belong to no one module, and what commands share."""
