"""Who may do what: the request guard, access rules, tokens, users and TLS."""
