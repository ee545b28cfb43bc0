"""The HTTP API: schema, route and document of each resource."""
