"""Authentication and authorization: the request guard, access rules, tokens, users and TLS."""
