"""Events of the node: out-of-memory errors, lost and returned devices, started and ended processes, actions.

`model` defines the types, `recorder` converts the sources to events with `ooms` and `processes`, `log` is the queue
with its thread, `storage` is the SQLite database, and `entries` has what people read of an event.

Other folders import: `event_log`, `event_recorder`, `event_routes`, `event_storage`, `process_events`.
"""
