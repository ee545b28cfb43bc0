"""Events of the node: out-of-memory errors, lost and returned devices, started and ended processes, actions.

`model` defines the types, `recorder` converts the sources to events with `ooms` and `processes`, `log` is the queue
with its thread, `storage` is the SQLite database, and `entries` has what people read of an event.

Other folders import: `entries`, `model`, `ooms`, `recorder`.
"""

from gpumem_exporter.events.log import EventLog, EventLogStatus
from gpumem_exporter.events.model import AUDIT_TYPES, EVENT_TYPES, Event, Page, Query
from gpumem_exporter.events.ooms import last_ooms
from gpumem_exporter.events.recorder import Recorder
from gpumem_exporter.events.storage import Storage

__all__ = [
    "AUDIT_TYPES",
    "EVENT_TYPES",
    "Event",
    "EventLog",
    "EventLogStatus",
    "Page",
    "Query",
    "Recorder",
    "Storage",
    "last_ooms",
]
