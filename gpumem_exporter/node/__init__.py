"""The node: the driver and its interface, the thread that polls it, and what the system shows of processes.

Only `pynvml_provider` imports pynvml, so a demo and a machine without a driver do not need it.

Other folders import: `containers`, `driver_library`, `failures`, `host`, `job_ids`, `linux`, `pid_namespaces`,
`pod_resources`, `poller`, `proc_entries`, `provider`, `pynvml_provider`, `reader`, `sockets`.
"""
