"""Reports: their schema, who may send one for which process, the route, and which reporters have ended.

Other folders import: `process_liveness`, `report_route`, `report_schema`, `report_sender`.
"""
