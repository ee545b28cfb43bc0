"""What tests of libraries share."""

from tests.support.processes.injected_scripts import exporter
from tests.support.processes.library_programs import start_library

__all__ = ["exporter", "start_library"]
