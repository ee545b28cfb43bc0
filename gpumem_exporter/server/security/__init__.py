"""Authentication and authorization: the request guard, access rules, tokens, users and TLS.

Other folders import: `certificate`, `report_sender`, `request_guard`, `tokens`, `web_access`, `web_config`.
"""
