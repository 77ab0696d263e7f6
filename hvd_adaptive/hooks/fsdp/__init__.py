"""From the tensors that FSDP2 reduces to steps."""
