"""Authentication and authorization: the request guard, access rules, tokens, users and TLS.

Other folders import: `report_sender`, `request_guard`, `tokens`, `web_access`.
"""
