"""How a POST that creates is taken and answered: at most once for its Idempotency-Key, and when `Prefer: wait` says.

Sources: the IETF draft "The Idempotency-Key HTTP Header Field" (quoted or bare keys), RFC 7240 (Prefer).
Invariant: a request that is refused leaves its key free; one that created something is answered the same again, or,
where no words are kept, with how its job stands by then.
"""

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header
from pydantic import BaseModel
from sqlalchemy.exc import OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from media_server.auth import Caller
from media_server.errors import Conflict, InvalidRequest, NotFound
from media_server.http_events import FALLBACK_S, EventFeed
from media_server.http_views import poll_after_ms
from media_server.jobs import idempotency, store
from media_server.jobs.database import Database
from media_server.jobs.idempotency import HOLD_S, HeldKey, HeldLine, Hold, KeptAnswer, KeyedRequest
from media_server.jobs.spec import Job

MAX_WAIT_S = 60
_KEY = re.compile(r'"(?P<quoted>(?:[ !#-\[\]-~]|\\["\\]){1,255})"|(?P<bare>[!#-~]{1,255})')
_WAIT = re.compile(r"wait(?:\s*=\s*(?P<value>\"[^\"]*\"|[^\s,;]*))?\s*(?:;.*)?", re.IGNORECASE)

# where a batch's worker names the line that a request of its own process is
BATCH_LINE = "batch_line"

Describe = Callable[[Database, Job], BaseModel]


@dataclass(frozen=True)
class Asked:
    """How a caller wants a request that creates to be taken: once for its key, answered after at most `wait_s`."""

    key: str | None
    wait_s: int | None


def read_asked(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            max_length=520,
            description="A string of the caller's choice. The same request sent again with it within a day is not "
            "done again: it gets the first one's answer.",
            examples=["8e03978e-40d5-43dd-bc93-6894a57f9324"],
        ),
    ] = None,
    prefer: Annotated[
        str | None,
        Header(
            max_length=200,
            description=f"`wait=n`: answer when the job has ended, or after n seconds (at most {MAX_WAIT_S}); "
            "`Preference-Applied` says how many were applied.",
            examples=["wait=30"],
        ),
    ] = None,
) -> Asked:
    """Read the two headers. Raises InvalidRequest for a malformed one."""
    if idempotency_key is None:
        return Asked(None, _wait_s(request))
    match = _KEY.fullmatch(idempotency_key.strip())
    if match is None or len(request.headers.getlist("idempotency-key")) != 1:
        rule = "one string of 1 to 255 printable ASCII characters, quoted or bare"
        raise InvalidRequest(
            f"Idempotency-Key: must be {rule}, got {idempotency_key[:60]!r}.",
            param="Idempotency-Key",
            rule=rule,
            value=idempotency_key[:60],
        )
    key = match["bare"] or re.sub(r"\\(.)", r"\1", match["quoted"])
    return Asked(key, _wait_s(request))


Taking = Annotated[Asked, Depends(read_asked)]


@contextlib.asynccontextmanager
async def accepting(
    request: Request, owner: Caller, asked: Asked, values: dict[str, Any], *, status: int = 200
) -> AsyncIterator[Hold | KeptAnswer | None]:
    """Hold the request's key while it is accepted; gives what it was answered before, if it was, or None without a key.

    A line of a batch is held by its worker already.

    `values` is the body's tree, `status` the status of the answer. Raises Unprocessable, StillAccepting or Conflict as
    `hold` does.
    """
    if isinstance(line := request.scope["state"].get(BATCH_LINE), HeldLine):
        yield line
        return
    if asked.key is None:
        yield None
        return
    db: Database = request.app.state.db
    digest = await run_in_threadpool(_fingerprint, f"{request.method} {request.url.path}", values)
    found = await run_in_threadpool(idempotency.hold, db, KeyedRequest(owner.owner_key_id, asked.key, digest), status)
    if isinstance(found, KeptAnswer):
        yield found
        return
    renewing = asyncio.create_task(_renew(db, found))
    try:
        yield found
    except BaseException:
        await asyncio.shield(run_in_threadpool(idempotency.let_go, db, found))
        raise
    finally:
        renewing.cancel()


async def answer_created(
    request: Request,
    job: Job,
    describe: Describe,
    asked: Asked,
    key: Hold | None,
    *,
    status: int = 200,
    location: str | None = None,
) -> Response:
    """Answer with a job that was just made, at once or when `Prefer: wait` says, and keep that answer for its key."""
    db: Database = request.app.state.db
    made = await run_in_threadpool(describe, db, job)
    body = made.model_dump_json()
    if isinstance(key, HeldKey) and job.answer_s is None:
        await run_in_threadpool(idempotency.keep_answer, db, key, body)
    return await _answer(request, job, body, describe, asked, status=status, location=location)


async def answer_again(
    request: Request, owner: Caller, kept: KeptAnswer, describe: Describe, asked: Asked, *, location: str | None = None
) -> Response:
    """Answer a request that was accepted before as it was answered then, or, if it waits, with how its job stands.

    Raises Conflict if the job has been deleted.
    """
    db: Database = request.app.state.db
    job = await run_in_threadpool(kept_job, db, owner, kept)
    body = kept.response
    if body is None:
        # its answer was lost before it was written down, or is not kept
        body = (await run_in_threadpool(describe, db, job)).model_dump_json()
    answer = await _answer(request, job, body, describe, asked, status=kept.status_code, location=location)
    answer.headers["idempotent-replayed"] = "true"
    return answer


def kept_job(db: Database, owner: Caller, kept: KeptAnswer) -> Job:
    """Read the job that a key has made. Raises Conflict if it has been deleted."""
    try:
        return owner.check(store.get(db, kept.made_id))
    except NotFound as error:
        raise Conflict(
            f"Idempotency-Key: {kept.made_id}, which this key made, has been deleted; a new request needs a new key.",
            code="idempotency_key_spent",
            param="Idempotency-Key",
            value=kept.made_id,
        ) from error


async def _answer(
    request: Request, job: Job, body: str, describe: Describe, asked: Asked, *, status: int, location: str | None
) -> Response:
    headers = {}
    if asked.wait_s is not None:
        db: Database = request.app.state.db
        job = await wait_for_end(request, job, asked.wait_s)
        body = (await run_in_threadpool(describe, db, job)).model_dump_json()
        headers["preference-applied"] = f"wait={asked.wait_s}"
        # 202 says that it is still to be made
        status = 200 if job.status.is_terminal else status
    headers["openai-poll-after-ms"] = poll_after_ms(job.status, job.eta_s)
    if location is not None:
        headers["location"] = location + job.id
    return Response(body, status_code=status, headers=headers, media_type=JSONResponse.media_type)


async def wait_for_end(request: Request, job: Job, wait_s: float) -> Job:
    """Wait for at most `wait_s` until a job has ended or the service stops.

    Gives it as it stands then, as last seen if it is deleted.
    """
    db: Database = request.app.state.db
    feed: EventFeed = request.app.state.event_feed
    with contextlib.suppress(TimeoutError, NotFound):
        async with asyncio.timeout(wait_s), feed.listen(job.root_id) as news:
            while True:
                news.clear()
                job = await run_in_threadpool(store.get, db, job.id)
                if job.status.is_terminal or feed.is_stopping:
                    return job
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), FALLBACK_S)
    return job


async def _renew(db: Database, held: HeldKey) -> None:
    while True:
        await asyncio.sleep(HOLD_S / 3)
        # a key that lapses is noticed when it is to be bound
        with contextlib.suppress(OperationalError):
            await run_in_threadpool(idempotency.renew, db, held)


def _wait_s(request: Request) -> int | None:
    """Read `wait` among the preferences; more than MAX_WAIT_S is applied as that, which the answer says."""
    for header in request.headers.getlist("prefer"):
        for preference in header.split(","):
            match = _WAIT.fullmatch(preference.strip())
            if match is None:
                continue
            text = (match["value"] or "").strip('"')
            if text == "":
                return MAX_WAIT_S
            if not (text.isascii() and text.isdigit() and len(text) <= 9):
                rule = "wait is a whole number of seconds"
                raise InvalidRequest(f"Prefer: {rule}, got {text[:40]!r}.", param="Prefer", rule=rule, value=text[:40])
            return min(int(text), MAX_WAIT_S)
    return None


def _fingerprint(what: str, values: dict[str, Any]) -> str:
    """Hash a request by what it says: forms differ in their boundary each time they are sent. Blocking."""

    def of_file(value: object) -> object:
        assert isinstance(value, UploadFile)
        value.file.seek(0)
        digest = hashlib.file_digest(value.file, "sha256").hexdigest()  # type: ignore[arg-type]
        value.file.seek(0)
        return {"sha256": digest}

    text = json.dumps(values, default=of_file, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{what}\n{text}".encode()).hexdigest()
