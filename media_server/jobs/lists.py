"""Lists of jobs by creation, as they are filtered and paged.

Invariant: every list is read from an index in its order, so that a page costs the same among 100,000 jobs as among
ten: `tables.list_index` has one for each filter that can be rare, and metadata a table of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sqlalchemy as sa

from media_server.errors import InvalidRequest
from media_server.jobs.database import Database, Transaction
from media_server.jobs.rows import select
from media_server.jobs.spec import Job, Page
from media_server.jobs.states import Status
from media_server.jobs.tables import job_metadata, jobs

MAX_PAGE = 1000


@dataclass(frozen=True)
class JobFilter:
    """Which jobs a list shows; what is None or empty excludes none. Times are unix seconds."""

    kinds: Sequence[str] | None = None
    status: Status | None = None
    model: str | None = None
    parent_id: str | None = None
    created_from: float | None = None
    created_before: float | None = None
    # all of these pairs
    metadata: Mapping[str, str] = field(default_factory=dict)


def list_jobs(
    db: Database,
    *,
    kinds: Sequence[str] | None = None,
    status: Status | None = None,
    parent_id: str | None = None,
    only: JobFilter | None = None,
    after: str | None = None,
    before: str | None = None,
    limit: int = 20,
    order: Literal["asc", "desc"] = "desc",
    owner_key_id: str | None = None,
) -> Page:
    """List jobs by creation, newest first unless `order` says otherwise.

    `after` and `before` are ids of jobs that the page follows or precedes in that order; with `before` alone it is
    the page right before it. `owner_key_id` None lists everybody's. Raises InvalidRequest if a cursor is unknown.
    """
    if not 1 <= limit <= MAX_PAGE:
        rule = f"from 1 to {MAX_PAGE}"
        raise InvalidRequest(f"limit: {rule}, got {limit}.", param="limit", rule=rule, value=limit)
    wanted = only or JobFilter(kinds=kinds, status=status, parent_id=parent_id)
    is_backwards = before is not None and after is None
    is_falling = (order == "desc") != is_backwards
    with db.read() as tx:
        bounds = []
        for param, id in (("after", after), ("before", before)):
            if id is not None:
                is_below = (param == "after") == (order == "desc")
                bounds.append((is_below, _place_of(tx, param, id, owner_key_id)))
        # one kind at a time, each from its index: together they would be looked for among all jobs
        found: list[Job] = []
        for kind in [None] if wanted.kinds is None else sorted(set(wanted.kinds)):
            query = list_query(wanted, kind=kind, bounds=bounds, is_falling=is_falling, owner_key_id=owner_key_id)
            found += select(tx, query.limit(limit + 1))
    found.sort(key=lambda job: (job.created_at, job.id), reverse=is_falling)
    page = found[:limit]
    return Page(data=page[::-1] if is_backwards else page, has_more=len(found) > limit)


def list_query(
    wanted: JobFilter,
    *,
    kind: str | None,
    bounds: Sequence[tuple[bool, tuple[float, str]]] = (),
    is_falling: bool = True,
    owner_key_id: str | None = None,
) -> sa.Select[Any]:
    """Select the jobs of a list in its order; each bound is a place that the jobs are below (True) or above."""
    created_at, id = jobs.c.created_at, jobs.c.id
    query = sa.select(jobs)
    pairs = list(wanted.metadata.items())
    if pairs:
        # the first pair leads, in the order of its index; the others are looked up job by job
        (key, value), *rest = pairs
        created_at, id = job_metadata.c.created_at, job_metadata.c.job_id
        query = query.join_from(job_metadata, jobs, jobs.c.id == job_metadata.c.job_id)
        query = query.where(job_metadata.c.key == key, job_metadata.c.value == value)
        for key, value in rest:
            other = job_metadata.alias()
            query = query.where(
                sa.exists().where(other.c.job_id == jobs.c.id, other.c.key == key, other.c.value == value)
            )
    query = query.where(jobs.c.deleted_at.is_(None))
    for column, equal in (
        (jobs.c.kind, kind),
        (jobs.c.status, wanted.status),
        (jobs.c.model, wanted.model),
        (jobs.c.parent_id, wanted.parent_id),
        (jobs.c.owner_key_id, owner_key_id),
    ):
        if equal is not None:
            query = query.where(column == equal)
    if wanted.created_from is not None:
        query = query.where(created_at >= wanted.created_from)
    if wanted.created_before is not None:
        query = query.where(created_at < wanted.created_before)
    for is_below, place in bounds:
        bound = sa.tuple_(*map(sa.literal, place))
        here = sa.tuple_(created_at, id)
        query = query.where(here < bound if is_below else here > bound)
    if is_falling:
        return query.order_by(created_at.desc(), id.desc())
    return query.order_by(created_at, id)


def _place_of(tx: Transaction, param: str, id: str, owner_key_id: str | None) -> tuple[float, str]:
    query = sa.select(jobs.c.created_at, jobs.c.id).where(jobs.c.id == id)
    if owner_key_id is not None:
        # what belongs to others does not exist
        query = query.where(jobs.c.owner_key_id == owner_key_id)
    row = tx.conn.execute(query).first()
    if row is None:
        raise InvalidRequest(f"{param}: no job has the id {id!r}.", param=param, rule="a job's id", value=id)
    return row.created_at, row.id
