"""The commands, one file each. click and Rich are imported here only, and never by `run`.

Other folders import: `api_client`, `clear`, `completion`, `kube`, `live`, `main`, `node`, `options`,
`program`, `usage`.
"""
