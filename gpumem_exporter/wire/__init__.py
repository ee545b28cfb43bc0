"""What client and exporter share: the protocol and its transport. Standard library only."""
