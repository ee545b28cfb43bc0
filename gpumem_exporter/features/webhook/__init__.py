"""`webhook`: the admission webhook of Kubernetes that lets pods use the client of their node."""
