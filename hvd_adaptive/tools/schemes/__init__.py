"""List schemes with their papers, parameters, bits, errors, bounds: `hvd-adaptive schemes`."""
