"""Work beside requests: housekeeping, ended processes, policies, profiles at an interval, reload on SIGHUP.

Other folders import: `cache_use`, `housekeeping`, `interval_profiles`, `policy_runner`, `presence`, `readings`.
"""
