"""What a list of jobs is asked for, the same for each kind: filters, page and order."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import Depends, Query
from starlette.requests import Request

from media_server.errors import InvalidRequest
from media_server.http_requests import ID_PATTERN
from media_server.jobs.lists import JobFilter
from media_server.jobs.states import Status

MAX_PAIRS = 16
_PREFIX = "metadata["

# FastAPI declares no objects in a query; `metadata[scene]=1` is OpenAPI's deepObject
METADATA_PARAMETER: dict[str, Any] = {
    "parameters": [
        {
            "name": "metadata",
            "in": "query",
            "required": False,
            "style": "deepObject",
            "explode": True,
            "description": "Only jobs whose metadata has these pairs, such as `metadata[scene]=1`.",
            "schema": {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MAX_PAIRS},
        }
    ]
}


@dataclass(frozen=True)
class AskedList:
    """Which jobs, from where on, how many, in which order."""

    only: JobFilter
    after: str | None
    before: str | None
    limit: int
    order: Literal["asc", "desc"]

    def of(self, *kinds: str, parent_id: str | None = None) -> dict[str, Any]:
        """Give the arguments of `store.list_jobs`, for these kinds, or for all if none is named."""
        only = replace(self.only, kinds=kinds or None, parent_id=parent_id)
        return {"only": only, "after": self.after, "before": self.before, "limit": self.limit, "order": self.order}


def read_list(
    request: Request,
    status: Annotated[Status | None, Query(description="Only in this state.")] = None,
    model: Annotated[str | None, Query(max_length=200, description="Only of this model.")] = None,
    created_from: Annotated[float | None, Query(ge=0, description="Only created then or later; unix seconds.")] = None,
    created_before: Annotated[float | None, Query(ge=0, description="Only created before then; unix seconds.")] = None,
    after: Annotated[str | None, Query(pattern=ID_PATTERN, description="The last id of the page before.")] = None,
    before: Annotated[str | None, Query(pattern=ID_PATTERN, description="The first id of the page after.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="By the time of creation.")] = "desc",
) -> AskedList:
    """Read a list's query. Raises InvalidRequest for malformed metadata."""
    only = JobFilter(
        status=status,
        model=model,
        created_from=created_from,
        created_before=created_before,
        metadata=_pairs(request),
    )
    return AskedList(only, after, before, limit, order)


Listing = Annotated[AskedList, Depends(read_list)]


def _pairs(request: Request) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name != "metadata" and not name.startswith(_PREFIX):
            continue
        key = name[len(_PREFIX) : -1]
        if not name.endswith("]") or not key or "]" in key or key in pairs:
            raise _bad("metadata[KEY]=VALUE, each key once", name)
        if "\0" in key + value:
            raise _bad("no NUL", name)
        pairs[key] = value
    if len(pairs) > MAX_PAIRS:
        raise _bad(f"at most {MAX_PAIRS} pairs", len(pairs))
    return pairs


def _bad(rule: str, value: object) -> InvalidRequest:
    shown = value if isinstance(value, int) else str(value)[:100].replace("\0", "?")
    return InvalidRequest(f"metadata: {rule}, got {shown!r}.", param="metadata", rule=rule, value=shown)
