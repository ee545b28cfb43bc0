"""Work beside requests: housekeeping, the detection of ended processes, policies, reload on SIGHUP.

Other folders import: `housekeeping`, `policy_runner`, `presence`, `readings`.
"""
