"""Work beside requests: housekeeping, ended processes, policies, reload on SIGHUP.

Other folders import: `cache_use`, `housekeeping`, `policy_runner`, `presence`, `readings`.
"""
