"""/v1/usage: what was used, by whom and for what; as objects, and as CSV for a spreadsheet."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse

from media_server import http_objects as objects
from media_server.auth import Owner
from media_server.errors import InvalidRequest
from media_server.http_requests import ID_PATTERN
from media_server.jobs.database import Database
from media_server.usage_report import Group, Period, columns_of, report, write_csv

router = APIRouter(prefix="/v1/usage", tags=["usage"])

_DEFAULT: tuple[Group, ...] = ("key",)
_CSV: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One line a group under a line of column names.",
        "content": {
            "text/csv": {
                "schema": {"type": "string"},
                "example": "key_id,key_name,label,gpu_seconds,prompt_tokens,completion_tokens,storage_bytes\r\n"
                "key_0192f0c1a5b07cc2a3f44b6f1d2e3c4d,studio,spot,73.5,220,1480,5242880\r\n",
            }
        },
    }
}


def _what(
    group_by: Annotated[list[Group] | None, Query(description="What a line stands for; by key if left out.")] = None,
    since: Annotated[
        float | None, Query(ge=0, le=1e11, description="Unix seconds; what was used from then on.")
    ] = None,
    until: Annotated[float | None, Query(ge=0, le=1e11, description="Unix seconds; what was used before then.")] = None,
    key_id: Annotated[
        str | None, Query(pattern=ID_PATTERN, description="Only this key's; a key without `admin` sees its own alone.")
    ] = None,
    label: Annotated[str | None, Query(max_length=128, description="Only of this project label.")] = None,
    film_id: Annotated[str | None, Query(pattern=ID_PATTERN, description="Only of this film.")] = None,
) -> dict[str, Any]:
    if since is not None and until is not None and since >= until:
        rule = "after since"
        raise InvalidRequest(f"until: {rule}, got {until:g}.", param="until", rule=rule, value=until)
    return {
        "groups": list(dict.fromkeys(group_by or _DEFAULT)),
        "period": Period(since, until),
        "owner_key_id": key_id,
        "label": label,
        "film_id": film_id,
    }


What = Annotated[dict[str, Any], Depends(_what)]


@router.get("", response_model=objects.UsagePage, summary="Report usage")
async def report_usage(
    request: Request,
    owner: Owner,
    what: What,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=2**31, description="How many lines to leave out first.")] = 0,
) -> objects.UsagePage:
    """Sum the ledger: GPU seconds, tokens and storage, by key, film, shot, label, model or job.

    A key sees its own usage, one with the scope `admin` everybody's. Usage outlives the jobs that it came from.
    """
    db: Database = request.app.state.db
    lines = await run_in_threadpool(report, db, **_own(owner, what), limit=limit + 1, offset=offset)
    data = [objects.UsageLine(**line) for line in lines[:limit]]
    return objects.UsagePage(data=data, has_more=len(lines) > limit)


@router.get("/export", summary="Export usage", response_class=StreamingResponse, responses=_CSV)
async def export_usage(request: Request, owner: Owner, what: What) -> StreamingResponse:
    """Give the same report whole, as CSV."""
    db: Database = request.app.state.db
    lines = await run_in_threadpool(report, db, **_own(owner, what))
    headers = {"content-disposition": 'attachment; filename="usage.csv"', "cache-control": "no-store"}
    return StreamingResponse(write_csv(columns_of(what["groups"]), lines), media_type="text/csv", headers=headers)


def _own(owner: Owner, what: dict[str, Any]) -> dict[str, Any]:
    """Keep a caller to what it may see: of another key there is nothing."""
    if owner.is_admin:
        return what
    if what["owner_key_id"] not in (None, owner.owner_key_id):
        raise InvalidRequest(
            "key_id: this key sees its own usage alone.",
            param="key_id",
            rule="the key's own id, or a key with the scope admin",
            value=what["owner_key_id"],
        )
    return {**what, "owner_key_id": owner.owner_key_id}
