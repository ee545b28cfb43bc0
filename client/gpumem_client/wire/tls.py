"""TLS to an exporter with an https URL. Only such a client imports this module, because `ssl` is slow to import."""

from __future__ import annotations

import socket
import ssl

from gpumem_client.wire.errors import ExporterUntrustedError

__all__ = ["over_tls"]


def over_tls(sock: socket.socket, host: str | bytes, shown_url: str) -> ssl.SSLSocket:
    """Start TLS on a new connection.

    The trusted authorities are the system's, or those in SSL_CERT_FILE, which is read each time.

    Args:
        sock: the connection; its timeout applies to each wait here.
        host: the name that the certificate must have.
        shown_url: the exporter's URL for error messages.

    Raises:
        ExporterUntrustedError: the certificate is not trusted.
        OSError: the server does not speak TLS, or closed the connection.
    """
    context = ssl.create_default_context()
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise ExporterUntrustedError(
            f"the certificate of the exporter at {shown_url} is not trusted: {error.verify_message}; set SSL_CERT_FILE "
            "to a file with its authority's certificate"
        ) from None
    except ssl.SSLError as error:
        raise OSError(f"no TLS with the server ({error.reason or 'it closed the connection'})") from error
