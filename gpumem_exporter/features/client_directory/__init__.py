"""The client in a folder of the node, from which jobs without the package import it."""
