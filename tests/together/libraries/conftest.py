"""What tests of libraries share."""

from tests.support.injected_scripts import exporter
from tests.support.library_programs import start_library

__all__ = ["exporter", "start_library"]
