"""HTTP as the exporter speaks it: listeners, limits of connections, content negotiation, problem documents."""
