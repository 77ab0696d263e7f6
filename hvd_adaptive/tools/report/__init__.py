"""Make a page of a training run from its monitor's log: `hvd-adaptive report`."""
