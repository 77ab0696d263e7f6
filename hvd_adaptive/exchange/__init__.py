"""How the ranks' payloads of a group become every rank's average."""
