"""An S3 server of the tests' own process (moto's), with one bucket, and the variables that lead to it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

BUCKET = "house"
# its first answer imports the most of it
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Bucket:
    """Where the bucket is; `variables` are the AWS variables by which any client finds it."""

    url: str
    variables: dict[str, str]

    def keys(self) -> list[str]:
        """List the keys of everything in the bucket."""
        text = httpx.get(f"{self.url}/{BUCKET}?list-type=2", timeout=_LIMIT_S, trust_env=False).text
        return [part.partition("</Key>")[0] for part in text.split("<Key>")[1:]]


@contextmanager
def running() -> Iterator[Bucket]:
    """Run the server; skips where moto is missing."""
    moto = pytest.importorskip("moto.server", reason="the S3 server comes with the test extra")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    variables = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    try:
        assert httpx.put(f"{url}/{BUCKET}", timeout=_LIMIT_S, trust_env=False).status_code == 200
        yield Bucket(url, variables)
    finally:
        server.stop()
