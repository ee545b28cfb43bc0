"""HTTP: listeners, the server with its limits, content negotiation, problem documents."""
