"""Check that the installed programs work together: `hvd-adaptive doctor`."""
