"""One POST of a signed message to a URL that a caller named, under http_fetch's rules; with a deadline over all of it.

Invariants: the name is resolved once and the connection goes to the address that was checked; no redirect is followed
and no body is read; what is said of a failure names no address; a name server that does not answer takes up a thread
of this module's own, never one that others wait for.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import httpx

from media_server.certificates import certificates
from media_server.errors import InvalidRequest
from media_server.http_fetch import CONNECT_TIMEOUT_S, resolve
from media_server.webhooks.signing import signed_headers

# Standard Webhooks: 15 to 30 s
TIMEOUT_S = 20.0
# names that are looked up at once; a dead name server holds each for some ten seconds
_LOOKUPS = 64


@dataclass(frozen=True)
class Answer:
    """What came of one try: a status and headers, or in words why there is none."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None


class Sender:
    """Connections and look-ups of one process that sends messages; `async with` opens and closes it."""

    def __init__(self, *, allow_private: bool, max_at_once: int = 8) -> None:
        self.allow_private = allow_private
        self._lookups = ThreadPoolExecutor(min(max_at_once, _LOOKUPS), thread_name_prefix="lookup")
        self._client = httpx.AsyncClient(
            # a kept connection would serve another host of the same address under this one's certificate
            limits=httpx.Limits(max_connections=max_at_once, max_keepalive_connections=0),
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            verify=certificates(trust_env=False),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, and leave look-ups that hang to themselves."""
        await self._client.aclose()
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def send(self, url: str, payload: str, *, message_id: str, secrets: Sequence[str], param: str) -> Answer:
        """POST one message, signed with each of the secrets; `param` names the field that the URL came in."""
        body = payload.encode()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                look_up = partial(resolve, url, param=param, allow_private=self.allow_private)
                target = await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
                request = self._client.build_request(
                    "POST",
                    target.url.copy_with(host=target.address),
                    content=body,
                    headers={
                        "host": target.url.netloc.decode("ascii"),
                        "content-type": "application/json",
                        "user-agent": "media-server",
                        **signed_headers(secrets, message_id, int(time.time()), body),
                    },
                    extensions={"sni_hostname": target.url.raw_host.decode("ascii").strip("[]")},
                )
                response = await self._client.send(request, stream=True)
                await response.aclose()
                return Answer(status=response.status_code, headers=response.headers)
        except InvalidRequest as error:
            return Answer(error=error.message)
        except TimeoutError:
            return Answer(error=f"no answer within {TIMEOUT_S:.0f} s")
        except (httpx.HTTPError, OSError) as error:
            # the kind of the failure, not the address that it names
            return Answer(error=f"the connection failed ({type(error).__name__})")
