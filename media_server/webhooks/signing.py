"""Signatures of webhooks: Standard Webhooks 1.0, scheme v1 (HMAC-SHA256 over `id.timestamp.body`).

Source: the Standard Webhooks specification (standardwebhooks.com). A secret is `whsec_` and the base64 of 24 to 64
random bytes. Several signatures may stand in the header, so that a rotated secret stays valid for a while.
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence

from media_server.settings import Settings

# in the data folder
SECRET_FILE = "webhook-secret"
SECRET_PREFIX = "whsec_"
_KEY_BYTES = range(24, 65)


def new_secret() -> str:
    """Make a secret of 32 random bytes."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Sign one message; returns `v1,<base64>`.

    Raises ValueError if the secret is not `whsec_` and the base64 of 24 to 64 bytes.
    """
    signed = b".".join((message_id.encode(), str(timestamp).encode(), body))
    return "v1," + base64.b64encode(hmac.digest(_key_of(secret), signed, hashlib.sha256)).decode()


def signed_headers(signing_secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Give the three headers of a message; each secret that is still valid adds one signature."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(sign(secret, message_id, timestamp, body) for secret in signing_secrets),
    }


def service_secret(settings: Settings) -> str:
    """Give the secret that signs messages to a request's own `webhook_url`; made on first use, for this user alone."""
    if settings.webhook_secret is not None:
        return settings.webhook_secret
    path = settings.data_dir / SECRET_FILE
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(fresh, "x", opener=_for_this_user) as file:
            file.write(f"{new_secret()}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            # a link never replaces the secret that another process made meanwhile
            os.link(fresh, path)
        # also what a process left that died here, or is about to find the secret of another
        for left in path.parent.glob(f"{path.name}.*"):
            left.unlink(missing_ok=True)
    return path.read_text().strip()


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _key_of(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("a webhook secret is whsec_ and base64") from error
    if not secret.startswith(SECRET_PREFIX) or len(key) not in _KEY_BYTES:
        raise ValueError("a webhook secret is whsec_ and the base64 of 24 to 64 bytes")
    return key
