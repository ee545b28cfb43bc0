"""Events of the node: out-of-memory errors, lost and returned devices, started and ended processes, actions.

`event_recorder` converts readings and reports to events; errors and actions have recorders of their own. `event_log` is
the queue with its thread, `event_storage` is the SQLite database, and `event_entries` has what people read of an event.
"""
