"""Turn the tensors that FSDP2 reduces into steps."""
