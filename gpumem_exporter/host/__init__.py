"""What the operating system says of processes: who they are, and whether they still are."""

from gpumem_exporter.host.linux import LinuxHost
from gpumem_exporter.host.protocol import Host

__all__ = ["Host", "LinuxHost"]
