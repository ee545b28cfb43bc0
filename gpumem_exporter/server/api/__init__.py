"""The HTTP API: schema, route and document of each resource.

Other folders import: `actions`, `alerts`, `audit`, `events`, `health`, `history`, `live`, `metrics`,
`nvml`, `policy`, `profile_intake`, `profiles`, `report_schema`, `reports`, `state`.
"""
