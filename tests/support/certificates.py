"""Certificate authorities and certificates for tests, made with the openssl command."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

_DAYS = "2"


@dataclass(frozen=True)
class Certificate:
    certificate: Path
    key: Path


class Authority:
    """Signs certificates. Everything is kept in `folder`; one that is there is used again."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.certificate = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        if self.certificate.exists():
            return
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-days", _DAYS, "-subj", f"/CN={name}"),
            *("-keyout", str(self._key), "-out", str(self.certificate)),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    def sign(self, name: str, alternatives: str = "") -> Certificate:
        """A certificate with this common name; `alternatives` as in `DNS:a,IP:127.0.0.1`."""
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        _openssl(
            *("req", "-new", *_NEW_KEY, "-subj", f"/CN={name}"),
            *("-keyout", str(made.key), "-out", str(request)),
        )
        extensions.write_text(f"subjectAltName={alternatives or f'DNS:{name}'}\n")
        _openssl(
            *("x509", "-req", "-days", _DAYS, "-in", str(request), "-CAcreateserial"),
            *("-CA", str(self.certificate), "-CAkey", str(self._key)),
            *("-extfile", str(extensions), "-out", str(made.certificate)),
        )
        return made

    def client_context(self, certificate: Certificate | None = None) -> ssl.SSLContext:
        """For a client that trusts this authority alone, and shows a certificate if it has one."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        if certificate is not None:
            context.load_cert_chain(certificate.certificate, certificate.key)
        return context


def server_context(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    return context


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
