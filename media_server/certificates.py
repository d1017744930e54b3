"""The certificates that this process trusts, read once: reading them takes longer than a request."""

import ssl
from functools import cache

import httpx


@cache
def certificates(*, trust_env: bool) -> ssl.SSLContext:
    """Give the trust store of every client of this process; with `trust_env` the one that SSL_CERT_FILE names."""
    return httpx.create_ssl_context(trust_env=trust_env)
