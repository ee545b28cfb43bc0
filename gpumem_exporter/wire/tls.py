"""TLS to an exporter behind https. Imported for such an exporter alone: `ssl` is nothing that others pay for."""

from __future__ import annotations

import socket
import ssl

from gpumem_exporter.errors import ExporterUntrustedError

__all__ = ["over_tls"]


def over_tls(sock: socket.socket, host: str | bytes, shown_url: str) -> ssl.SSLSocket:
    """Agree on TLS over a connection that has just been made.

    Whom to believe is the system's to say, and SSL_CERT_FILE's, which is read anew each time.

    Args:
        sock: the connection; its timeout is for each wait in here as well.
        host: whom the certificate must name.
        shown_url: the exporter, for messages.

    Raises:
        ExporterUntrustedError: the certificate is not believed.
        OSError: the other end does not speak TLS, or is gone.
    """
    context = ssl.create_default_context()
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise ExporterUntrustedError(
            f"the certificate of the exporter at {shown_url} is not believed: {error.verify_message}; the file in "
            "SSL_CERT_FILE, else the system, says which authorities are"
        ) from None
    except ssl.SSLError as error:
        raise OSError(f"no TLS with what answers there ({error.reason or 'it hung up'})") from error
