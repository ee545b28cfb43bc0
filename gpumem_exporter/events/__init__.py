"""What happened on the node: out-of-memory errors, devices lost and returned, processes that came and went, actions.

`model` is the vocabulary; `ooms`, `processes`, `devices` and `actions` each turn one source into events; `recorder`
brings the sources together; `log` is the queue and the one thread behind it; `storage` is SQLite, and it alone.
"""

from gpumem_exporter.events.log import EventLog, EventLogStatus
from gpumem_exporter.events.model import EVENT_TYPES, Event, Page, Query
from gpumem_exporter.events.ooms import last_ooms
from gpumem_exporter.events.recorder import Recorder
from gpumem_exporter.events.storage import Storage

__all__ = ["EVENT_TYPES", "Event", "EventLog", "EventLogStatus", "Page", "Query", "Recorder", "Storage", "last_ooms"]
