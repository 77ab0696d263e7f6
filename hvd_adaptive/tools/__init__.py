"""Define the `hvd-adaptive` command and what its subcommands share; no other package imports it."""
