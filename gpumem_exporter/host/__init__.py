"""The operating system's description of processes, and whether they still run."""

from gpumem_exporter.host.linux import LinuxHost
from gpumem_exporter.host.protocol import Host

__all__ = ["Host", "LinuxHost"]
