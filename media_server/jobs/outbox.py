"""Messages to webhook receivers: written with the end of the job or batch, taken by the delivery worker under a lease.

Standard Webhooks: the row's id is the `webhook-id`; its payload is fixed when it is written, so each try sends and
signs the same bytes. Only roots are announced: a film's shots are its own affair.
"""

import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from media_server.figures import WEBHOOK_LAG_SECONDS, WEBHOOK_TRIES, WEBHOOK_TRY_SECONDS
from media_server.ids import new_id
from media_server.jobs.database import Database, Transaction
from media_server.jobs.spec import Job
from media_server.jobs.tables import batches, deliveries, jobs, outbox, webhook_endpoints

logger = logging.getLogger(__name__)

DELIVERIES_POOL = "deliveries"
# an endpoint that has answered nothing well for so long gets nothing more until its owner enables it again
DISABLE_AFTER_S = 5 * 86400.0
# an endpoint that wants every event, also of kinds that come later
ANY_EVENT = "*"


@dataclass(frozen=True)
class Message:
    """One message to one receiver, with the secrets that are valid now (newest first; none for a per-job URL)."""

    id: str
    # what it is about: one of the two
    job_id: str | None
    batch_id: str | None
    endpoint_id: str | None
    url: str
    receiver: str
    type: str
    payload: str
    attempts: int
    # attempts before the last replay, which do not count against the schedule
    uncounted: int
    secrets: list[str]
    created_at: float
    # of the request that made the job or the batch
    traceparent: str | None


def enqueue(tx: Transaction, job: Job, event_seq: int, type: str) -> int:
    """Write a row for each receiver that wants this event of a root job; returns how many."""
    if job.parent_id is not None:
        return 0
    # endpoint, URL of the request, and where the message goes
    receivers: list[tuple[str | None, str | None, str]] = []
    if job.webhook_url:
        receivers.append((None, job.webhook_url, receiver_of(job.webhook_url, job.owner_key_id)))
    receivers += [(id, None, id) for id in _endpoints_for(tx, job.owner_key_id, type)]
    for endpoint_id, url, receiver in receivers:
        _write(
            tx,
            type,
            job.id,
            job_id=job.id,
            event_seq=event_seq,
            owner_key_id=job.owner_key_id,
            endpoint_id=endpoint_id,
            url=url,
            receiver=receiver,
        )
    if receivers:
        tx.ring(DELIVERIES_POOL)
    return len(receivers)


def enqueue_batch(tx: Transaction, batch_id: str, owner_key_id: str | None, type: str) -> int:
    """Write a row for each endpoint of an owner's that wants this event of a batch; returns how many."""
    endpoints = _endpoints_for(tx, owner_key_id, type)
    for id in endpoints:
        _write(tx, type, batch_id, batch_id=batch_id, owner_key_id=owner_key_id, endpoint_id=id, receiver=id)
    if endpoints:
        tx.ring(DELIVERIES_POOL)
    return len(endpoints)


def _endpoints_for(tx: Transaction, owner_key_id: str | None, type: str) -> list[str]:
    """Find the enabled endpoints of an owner that want an event."""
    owner = webhook_endpoints.c.owner_key_id
    rows = tx.conn.execute(
        sa.select(webhook_endpoints.c.id, webhook_endpoints.c.event_types).where(
            webhook_endpoints.c.is_enabled, owner == owner_key_id if owner_key_id is not None else owner.is_(None)
        )
    )
    return [row.id for row in rows if type in row.event_types or ANY_EVENT in row.event_types]


def _write(tx: Transaction, type: str, about: str, **values: Any) -> None:
    """Write one message, due now."""
    id, now = new_id("evt"), tx.now()
    tx.conn.execute(
        outbox.insert().values(
            id=id,
            type=type,
            payload=make_payload(id, type, about, now),
            state="pending",
            attempts=0,
            uncounted=0,
            next_at=now,
            created_at=now,
            **values,
        )
    )


def make_payload(id: str, type: str, about: str, created_at: float) -> str:
    """Write what a receiver is told: OpenAI's event, which names the job or batch and says nothing more of it."""
    event = {"id": id, "object": "event", "created_at": int(created_at), "type": type, "data": {"id": about}}
    return json.dumps(event, separators=(",", ":"))


def forget_urls(tx: Transaction, job_id: str) -> None:
    """Remove the URLs of a job's settled messages: a caller may have put a secret into them."""
    settled = sa.and_(outbox.c.job_id == job_id, outbox.c.state != "pending", outbox.c.endpoint_id.is_(None))
    tx.conn.execute(outbox.update().where(settled).values(url=None, receiver=""))


def receiver_of(url: str, owner_key_id: str | None) -> str:
    """Name who receives at a request's own URL: its owner, and scheme, host and port.

    A managed endpoint is a receiver by its id. A slow receiver holds up its own messages only, also on a host that
    others have their receivers on; the path does not count, since programs that wait for one answer have one each.
    """
    owner = f"{owner_key_id} " if owner_key_id else ""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode("ascii")
        port = parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:
        # it is refused when it is sent; here it may not keep a job from ending
        return owner + url[:200]
    return f"{owner}{parts.scheme}://{host}:{port}"


def claim_due(
    db: Database,
    worker: str,
    *,
    lease_s: float,
    limit: int = 16,
    busy: Mapping[str, int] | None = None,
    per_receiver: int = 4,
    failing: Collection[str] = (),
    limit_failing: int | None = None,
) -> list[Message]:
    """Take the messages that are due, for `lease_s`; a message whose taker died is taken again after that.

    `busy` counts what is on its way to each receiver; none gets more than `per_receiver` at once, and however many
    wait for one, those for others are found. A receiver that is `failing` gets one at once, and all of these together
    no more than `limit_failing`, however many they are: the rest of the places stays free for those that answer.
    Messages to an endpoint that is disabled wait until it is enabled again.
    """
    on_the_way = Counter(busy or {})
    most = dict.fromkeys(failing, 1)
    to_failing = sum(on_the_way[receiver] for receiver in most)
    has_room_to_fail = limit_failing is None or to_failing < limit_failing
    full = [receiver for receiver, count in on_the_way.items() if count >= most.get(receiver, per_receiver)]
    if not has_room_to_fail:
        full = [*{*full, *most}]
    now = sa.bindparam("now", type_=sa.Double)
    is_due = sa.and_(
        outbox.c.state == "pending",
        outbox.c.next_at <= now,
        sa.or_(outbox.c.lease_until.is_(None), outbox.c.lease_until <= now),
    )
    both = outbox.outerjoin(webhook_endpoints, outbox.c.endpoint_id == webhook_endpoints.c.id)
    place = sa.func.row_number().over(partition_by=outbox.c.receiver, order_by=(outbox.c.next_at, outbox.c.id))
    ranked = (
        sa.select(outbox.c.id, outbox.c.receiver, outbox.c.next_at, place.label("place"))
        .select_from(both)
        .where(is_due, webhook_endpoints.c.is_enabled.is_not(False), outbox.c.receiver.not_in(full))
        .subquery()
    )
    first = (
        sa.select(ranked.c.id, ranked.c.receiver)
        .where(ranked.c.place <= per_receiver)
        .order_by(ranked.c.next_at, ranked.c.id)
    )
    ids: list[str] = []
    # chosen before the write lock is asked for: a long queue is looked through at nobody's cost
    with db.read() as tx:
        for row in tx.conn.execute(first, {"now": tx.now()}).all():
            is_failing = row.receiver in most
            if is_failing and limit_failing is not None and to_failing >= limit_failing:
                continue
            if len(ids) < limit and on_the_way[row.receiver] < most.get(row.receiver, per_receiver):
                to_failing += is_failing
                on_the_way[row.receiver] += 1
                ids.append(row.id)
    if not ids:
        return []
    with db.write("take_message") as tx:
        taken = tx.conn.scalars(
            outbox.update()
            .where(outbox.c.id.in_(ids), is_due)
            .values(lease_owner=worker, lease_until=tx.now() + lease_s)
            .returning(outbox.c.id),
            {"now": tx.now()},
        ).all()
        rows = tx.conn.execute(
            sa.select(outbox, webhook_endpoints, jobs.c.traceparent, batches.c.traceparent)
            .select_from(
                both.outerjoin(jobs, outbox.c.job_id == jobs.c.id).outerjoin(
                    batches, outbox.c.batch_id == batches.c.id
                )
            )
            .where(outbox.c.id.in_(taken))
            .order_by(outbox.c.next_at, outbox.c.id)
            .set_label_style(sa.LABEL_STYLE_TABLENAME_PLUS_COL)
        )
        messages = []
        for row in rows:
            secrets = [row.webhook_endpoints_secret] if row.webhook_endpoints_secret else []
            secrets += [secret for secret, until in row.webhook_endpoints_old_secrets or () if until > tx.now()]
            messages.append(
                Message(
                    id=row.outbox_id,
                    job_id=row.outbox_job_id,
                    batch_id=row.outbox_batch_id,
                    endpoint_id=row.outbox_endpoint_id,
                    url=row.outbox_url or row.webhook_endpoints_url,
                    receiver=row.outbox_receiver,
                    type=row.outbox_type,
                    payload=row.outbox_payload,
                    attempts=row.outbox_attempts,
                    uncounted=row.outbox_uncounted,
                    secrets=secrets,
                    created_at=row.outbox_created_at,
                    traceparent=row.jobs_traceparent or row.batches_traceparent,
                )
            )
        return messages


def settle(
    db: Database,
    message: Message,
    worker: str,
    *,
    started_at: float,
    duration_s: float,
    status_code: int | None = None,
    error: str | None = None,
    retry_in_s: float | None = None,
    disables: str | None = None,
) -> bool:
    """Log a try at a message and say what follows: delivered (no error), another try in `retry_in_s`, or dead.

    `disables` is the reason to send nothing more to its endpoint; that every try has failed for DISABLE_AFTER_S is one
    too. Returns whether the message was still this worker's.
    """
    state = "delivered" if error is None else "dead" if retry_in_s is None else "pending"
    with db.write("settle_message") as tx:
        now = tx.now()
        taken = tx.conn.execute(
            outbox.update()
            .where(outbox.c.id == message.id, outbox.c.state == "pending", outbox.c.lease_owner == worker)
            .values(
                state=state,
                attempts=outbox.c.attempts + 1,
                next_at=now + retry_in_s if state == "pending" and retry_in_s is not None else None,
                lease_owner=None,
                lease_until=None,
                settled_at=None if state == "pending" else now,
            )
        )
        if taken.rowcount == 0:
            return False
        outcome = "retry" if state == "pending" else state
        tx.counts.count(WEBHOOK_TRIES, outcome)
        tx.counts.observe(WEBHOOK_TRY_SECONDS, outcome, seconds=duration_s)
        # a replay says nothing of how late the first message was
        if state == "delivered" and not message.uncounted:
            tx.counts.observe(WEBHOOK_LAG_SECONDS, seconds=max(0.0, now - message.created_at))
        is_deleted = sa.select(jobs.c.deleted_at).where(jobs.c.id == message.job_id)
        if state != "pending" and message.job_id is not None and tx.conn.scalar(is_deleted):
            forget_urls(tx, message.job_id)
        tx.conn.execute(
            deliveries.insert().values(
                outbox_id=message.id,
                number=message.attempts + 1,
                started_at=started_at,
                duration_s=duration_s,
                status_code=status_code,
                error=error,
            )
        )
        if message.endpoint_id is not None:
            _note_health(tx, message.endpoint_id, is_failing=error is not None, disables=disables)
        return True


def _note_health(tx: Transaction, endpoint_id: str, *, is_failing: bool, disables: str | None) -> None:
    """Note on an endpoint since when it has been failing, and why it gets nothing more."""
    table = webhook_endpoints
    now = tx.now()
    if not is_failing:
        tx.conn.execute(table.update().where(table.c.id == endpoint_id).values(failing_since=None))
        return
    since = tx.conn.scalar(
        table.update()
        .where(table.c.id == endpoint_id)
        .values(failing_since=sa.func.coalesce(table.c.failing_since, now))
        .returning(table.c.failing_since)
    )
    if disables is None and since is not None and since <= now - DISABLE_AFTER_S:
        disables = f"every message has failed for {DISABLE_AFTER_S / 86400:g} days"
    if disables is not None:
        tx.conn.execute(
            table.update()
            .where(table.c.id == endpoint_id, table.c.is_enabled)
            .values(is_enabled=False, disabled_reason=disables, updated_at=now)
        )
        logger.warning("webhook endpoint %s: disabled, %s", endpoint_id, disables)
