"""What is asked of every request that brings work, and what every answer says of its key's quotas.

Which operations bring work is said here once, for the routes and for the OpenAPI document.
"""

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from media_server.artifacts.room import check_room
from media_server.auth import Caller
from media_server.quotas import Allowance, standing
from media_server.text.slots import count_slots

# operations that write a job, or a file for some, and so need room on the disk
MAKES_JOBS = frozenset(
    {
        "create_video",
        "extend_video",
        "remix_video",
        "create_film",
        "create_storyboard",
        "create_file",
        "create_batch",
    }
)
MAKES_TEXT = frozenset({"create_chat_completion", "create_completion"})


async def refuse_when_full(request: Request) -> None:
    """Raise InsufficientStorage for a request that would write a job to a disk that is nearly full."""
    if request.scope["route"].name in MAKES_JOBS:
        state = request.app.state
        await run_in_threadpool(check_room, state.settings, state.artifacts)


class QuotaHeadersMiddleware:
    """Say in `x-ratelimit-*` what is left of a key's quotas, on each answer to a request that brings work."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_quotas(message: Message) -> None:
            caller = scope.get("state", {}).get("caller")
            route = scope.get("route")
            if (
                message["type"] == "http.response.start"
                and isinstance(caller, Caller)
                and caller.limits.has_quotas
                and getattr(route, "name", None) in MAKES_JOBS | MAKES_TEXT
            ):
                headers = MutableHeaders(scope=message)
                for allowance in await _allowances(scope, caller):
                    headers.update(allowance.headers())
            await send(message)

        await self.app(scope, receive, send_with_quotas)


async def _allowances(scope: Scope, caller: Caller) -> list[Allowance]:
    """Look at a key's quotas as they are after the request."""
    state, owner = scope["app"].state, caller.owner_key_id
    if owner is None:
        return []
    found = await run_in_threadpool(standing, state.db, owner, caller.limits)
    if caller.limits.text_streams is not None:
        held = await count_slots(state.redis, owner)
        if held is not None:
            found.append(Allowance("streams", caller.limits.text_streams, held))
    return found
