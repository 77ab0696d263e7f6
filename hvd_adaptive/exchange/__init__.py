"""Turn the ranks' payloads of a group into every rank's average."""
