"""Fetch a URL that a caller named, without lending the caller this machine's place in the network.

Invariants (OWASP's rules against server-side request forgery): a name is resolved once and the connection goes to that
very address; every address of every hop must be public; bytes and seconds are capped; no proxy, cookie or credential of
this process is used; an error never says what an address was or what answered there.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import httpx

from media_server.certificates import certificates
from media_server.errors import InvalidRequest

MAX_REDIRECTS = 5
CONNECT_TIMEOUT_S = 5.0
MAX_URL_CHARS = 2048

# a dead name server holds its thread for longer than anybody waits: what else needs the loop's threads goes on
_LOOK_UPS = ThreadPoolExecutor(16, thread_name_prefix="look-up")
_HOST = re.compile(rb"[A-Za-z0-9._-]+")
_PUBLIC_RULE = "the URL's host has a public address"

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
# tunnels and translations that carry another address inside, and blocks that older tables call global
_REFUSED_V6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_REFUSED_V4 = tuple(
    map(ipaddress.IPv4Network, ("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "224.0.0.0/3"))
)


@dataclass(frozen=True)
class Fetched:
    """What a URL gave."""

    content: bytes
    content_type: str


@dataclass(frozen=True)
class Target:
    """A URL whose host has been resolved and allowed; `address` is where the connection goes."""

    url: httpx.URL
    address: str


async def fetch(
    url: str, *, param: str, max_bytes: int, timeout_s: float, allow_private: bool, tls: ssl.SSLContext | None = None
) -> Fetched:
    """Get the bytes of `url`, following at most MAX_REDIRECTS redirects, each checked like the first.

    `tls` replaces the default trust store, for closed networks with a CA of their own.
    Raises InvalidRequest naming `param` if the URL is not allowed, does not answer in time or is too large.
    """
    try:
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(
                trust_env=False,
                follow_redirects=False,
                verify=tls or certificates(trust_env=False),
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            ) as client,
        ):
            for _ in range(MAX_REDIRECTS + 1):
                look_up = partial(resolve, url, param=param, allow_private=allow_private)
                target = await asyncio.get_running_loop().run_in_executor(_LOOK_UPS, look_up)
                answer = await _get(client, target, param=param, max_bytes=max_bytes)
                if isinstance(answer, Fetched):
                    return answer
                url = answer
            raise _refused(param, f"at most {MAX_REDIRECTS} redirects")
    except TimeoutError as error:
        raise _refused(param, f"the URL answers within {timeout_s:g} s") from error
    except (httpx.InvalidURL, UnicodeError) as error:
        # of a redirect: the first URL has been checked
        raise _refused(param, "the URL redirects to a valid URL") from error
    except (httpx.HTTPError, ssl.SSLError, OSError) as error:
        raise _refused(param, "the URL can be fetched") from error


def check_url(url: str, *, param: str, allow_private: bool) -> httpx.URL:
    """Check a URL's form, without a look-up: https, a host, no user name, and no literal address that is not public.

    Raises InvalidRequest that names `param`.
    """
    if len(url) > MAX_URL_CHARS:
        raise _refused(param, f"a URL has at most {MAX_URL_CHARS} characters")
    try:
        parsed = httpx.URL(url)
        # decoding an international name (xn--) may fail too
        host = parsed.host
    except (httpx.InvalidURL, UnicodeError) as error:
        raise _refused(param, "a valid URL") from error
    if parsed.scheme not in (("https", "http") if allow_private else ("https",)):
        raise _refused(param, "the URL's scheme is https")
    if not host or parsed.userinfo:
        raise _refused(param, "the URL has a host and no user name")
    # httpx writes what no name may hold as %20
    if ":" not in host and not _HOST.fullmatch(parsed.raw_host):
        raise _refused(param, "the URL's host is a name of letters, digits, hyphens and dots, or an address")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise _refused(param, "the URL's port is from 1 to 65535")
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return parsed
    if not (allow_private or is_public(literal)):
        raise _refused(param, _PUBLIC_RULE)
    return parsed


def resolve(url: str, *, param: str, allow_private: bool) -> Target:
    """Check a URL and resolve its host once; blocking, so call it in a thread.

    Raises InvalidRequest if the URL's form, or one of the host's addresses, is not allowed.
    """
    parsed = check_url(url, param=param, allow_private=allow_private)
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(parsed.host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _refused(param, _PUBLIC_RULE) from error
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not (allow_private or all(is_public(ipaddress.ip_address(text)) for text in addresses)):
        # the same answer as for a name that does not exist: the caller learns nothing of the network inside
        raise _refused(param, _PUBLIC_RULE)
    return Target(parsed, addresses[0])


def is_public(address: IPAddress) -> bool:
    """Say whether an address is one of the open internet: no private, loopback, link-local, metadata, shared,
    multicast, reserved or tunnelled address, and none of these inside a mapped or translated IPv6 address."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        # a mapped address (::ffff:0:0/96) lies outside the global block and is refused with everything else there
        return (
            address.scope_id is None
            and address in _GLOBAL_UNICAST
            and address.is_global
            and not any(address in network for network in _REFUSED_V6)
        )
    return address.is_global and not any(address in network for network in _REFUSED_V4)


async def _get(client: httpx.AsyncClient, target: Target, *, param: str, max_bytes: int) -> Fetched | str:
    """Make one request to the pinned address; returns the file, or the URL that it redirects to."""
    host = target.url.netloc.decode("ascii")
    request = client.build_request(
        "GET",
        target.url.copy_with(host=target.address),
        # identity, so that the cap on bytes is a cap on what comes out as well
        headers={"host": host, "accept-encoding": "identity", "user-agent": "media-server"},
        extensions={"sni_hostname": target.url.raw_host.decode("ascii").strip("[]")},
    )
    response = await client.send(request, stream=True)
    try:
        if response.has_redirect_location:
            return str(target.url.join(response.headers["location"]))
        if response.status_code != 200:
            raise _refused(param, "the URL answers with status 200")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise _refused(param, "the URL answers without a content encoding")
        declared = response.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _refused(param, f"the file has at most {max_bytes} bytes")
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > max_bytes:
                raise _refused(param, f"the file has at most {max_bytes} bytes")
        return Fetched(bytes(content), response.headers.get("content-type", ""))
    finally:
        await response.aclose()


def _refused(param: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: this URL breaks the rule: {rule}.", code="invalid_url", param=param, rule=rule)
