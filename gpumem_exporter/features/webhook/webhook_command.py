"""`webhook`: the admission webhook of Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_EXAMPLES = """\b
Examples:
  gpumem-exporter webhook --web.tls-cert-file /tls/tls.crt --web.tls-key-file /tls/tls.key
"""


@click.command(epilog=_EXAMPLES, context_settings={"show_default": True})
@click.option(
    "--web.listen-address", "address", metavar="ADDRESS", default=":9443", help="HOST:PORT, [IPV6]:PORT or :PORT."
)
@click.option(
    *("--web.tls-cert-file", "certificate_file"),
    type=Path,
    metavar="PATH",
    required=True,
    help="Certificate and its chain in PEM. It is read again when it changes.",
)
@click.option(
    *("--web.tls-key-file", "key_file"),
    type=Path,
    metavar="PATH",
    required=True,
    help="Its key in PEM, without a passphrase.",
)
@click.option(
    *("--socket.host-path", "host_path"),
    metavar="PATH",
    default="/run/gpumem",
    help="Folder of the nodes with the exporter's socket and the client.",
)
@click.option(
    *("--log.level", "log_level"),
    metavar="WORD",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="debug, info, warning or error",
)
@click.option(
    *("--log.format", "log_format"),
    metavar="WORD",
    type=click.Choice(["logfmt", "json"]),
    default="logfmt",
    help="logfmt or json",
)
def webhook(**settings: Any) -> int:
    """Run the admission webhook of Kubernetes.

    It lets pods with the label gpumem.io/inject, or of namespaces with it, use the client that the exporter of their
    node provides, without a change to their images. The Helm chart installs it with `webhook.enabled`.
    """
    from gpumem_exporter.features.webhook.webhook_server import run

    return run(**settings)
