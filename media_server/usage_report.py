"""Sums of the ledger, by key, film, shot, label, model or job: one query, read as objects or as CSV."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import sqlalchemy as sa

from media_server.jobs.database import Database
from media_server.jobs.tables import api_keys, usage

Group = Literal["key", "film", "shot", "label", "model", "job"]
GROUPS: tuple[Group, ...] = get_args(Group)
KINDS = ("gpu_seconds", "prompt_tokens", "completion_tokens", "storage_bytes")
# a spreadsheet takes a cell that begins so for a formula
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_ROWS_A_CHUNK = 500

_COLUMNS: dict[Group, dict[str, sa.ColumnElement[Any]]] = {
    "key": {"key_id": usage.c.owner_key_id, "key_name": api_keys.c.name},
    # the root of what is no film is the job itself
    "film": {"film_id": sa.case((usage.c.root_id.startswith("film_", autoescape=True), usage.c.root_id))},
    "shot": {"shot": usage.c.shot},
    "label": {"label": usage.c.label},
    "model": {"model": usage.c.model},
    "job": {"job_id": usage.c.job_id},
}


@dataclass(frozen=True)
class Period:
    """Unix seconds from `since` up to, not including, `until`; None is without end."""

    since: float | None = None
    until: float | None = None


def report(
    db: Database,
    groups: Sequence[Group],
    *,
    period: Period = Period(),
    owner_key_id: str | None = None,
    label: str | None = None,
    film_id: str | None = None,
    limit: int | None = None,
    offset: int = 0,
) -> list[dict[str, Any]]:
    """Sum the ledger by these groups, in the order of their columns; what belongs to nobody has None.

    GPU seconds and tokens are those of the period, storage is what is kept at its end.
    """
    columns = {name: column for group in groups for name, column in _COLUMNS[group].items()}
    query = sa.select(
        *(column.label(name) for name, column in columns.items()),
        *(_sum(kind, period).label(kind) for kind in KINDS),
    ).select_from(usage.outerjoin(api_keys, api_keys.c.id == usage.c.owner_key_id))
    if owner_key_id is not None:
        query = query.where(usage.c.owner_key_id == owner_key_id)
    if label is not None:
        query = query.where(usage.c.label == label)
    if film_id is not None:
        query = query.where(usage.c.root_id == film_id)
    if period.until is not None:
        query = query.where(usage.c.created_at < period.until)
    # by name: PostgreSQL does not see that two expressions with parameters are one
    names: list[sa.ColumnElement[Any]] = [sa.literal_column(name) for name in columns]
    # SQLite puts nothing first and PostgreSQL last, unless they are told
    order = [sa.nulls_first(name.asc()) for name in names]
    query = query.group_by(*names).order_by(*order).limit(limit).offset(offset)
    with db.read() as tx:
        return [{**row, "storage_bytes": int(row["storage_bytes"])} for row in tx.conn.execute(query).mappings()]


def columns_of(groups: Sequence[Group]) -> list[str]:
    """Name the columns of a report."""
    return [name for group in groups for name in _COLUMNS[group]] + list(KINDS)


def write_csv(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    """Write a report as CSV (RFC 4180), some hundred lines at a time; texts that would be formulas are quoted."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(columns)
    for number, row in enumerate(rows, start=1):
        writer.writerow([_cell(row[name]) for name in columns])
        if number % _ROWS_A_CHUNK == 0:
            yield buffer.getvalue().encode()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode()


def _sum(kind: str, period: Period) -> sa.ColumnElement[float]:
    counts = usage.c.kind == kind
    if period.since is not None and kind != "storage_bytes":
        counts = sa.and_(counts, usage.c.created_at >= period.since)
    return sa.func.coalesce(sa.func.sum(sa.case((counts, usage.c.amount), else_=0.0)), 0.0)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.12g}"
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
