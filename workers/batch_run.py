"""One batch in the hands of its worker: read, its lines sent a few at a time, its jobs waited for, its files written.

Whatever breaks off, the rows say how to go on: lines that were sent and made no job are sent again, jobs are waited
for, files are written again. Invariant: nothing is written once the lease is lost.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel

from media_server.artifacts.store import ArtifactStore
from media_server.batches import files, outputs, running
from media_server.batches.lines import ENDPOINTS, PRIORITY, LineSpec, answered, failed, read_lines, request_body
from media_server.batches.running import BatchLost, Line
from media_server.batches.store import BatchRow
from media_server.errors import NotFound
from media_server.http_views import film_object, video_object
from media_server.jobs import store
from media_server.jobs.database import Database
from media_server.jobs.spec import Job
from media_server.jobs.states import Status
from media_server.keys import find_valid_key
from media_server.routes.storyboards import storyboard_object
from media_server.settings import Settings
from media_server.tasks import end_tasks
from media_server.text.slots import count_slots
from workers.batch_requests import LineAnswer, send_line

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

_TICK_S = 0.5
_ENDS = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request had ended."),
    "expired": ("batch_expired", "The batch's completion window was over before this request had ended."),
}
_BAD_FILE = "The file has no request in it: it must be JSON lines, one request a line."


@dataclass
class Host:
    """What the batches of one worker share: its application, its name, and how much of each owner is under way."""

    settings: Settings
    app: FastAPI
    worker: str
    stopping: asyncio.Event
    under_way: Counter[str | None] = field(default_factory=Counter)

    @property
    def db(self) -> Database:
        """The application's database."""
        db: Database = self.app.state.db
        return db

    @property
    def artifacts(self) -> ArtifactStore:
        """The application's files."""
        artifacts: ArtifactStore = self.app.state.artifacts
        return artifacts


class BatchRun:
    """A batch from its claim to its end, or until the worker stops."""

    def __init__(self, host: Host, batch: BatchRow) -> None:
        self.host = host
        self.batch = batch
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._jobs_counted = 0
        self._beat_at = 0.0
        self._input_key = ""

    async def run(self) -> None:
        """Do what is left of the batch; gives it back if the worker stops. What is lost is left alone."""
        logger.info("batch %s: taken, %s", self.batch.id, self.batch.status)
        try:
            await self._run()
        except BatchLost:
            logger.warning("batch %s: another worker has it", self.batch.id)
        finally:
            await self._break_off()
            self._count_jobs(0)

    async def _run(self) -> None:
        is_unread = self.batch.status in ("validating", "cancelling") and self.batch.total == 0
        if is_unread and not await self._ingest():
            return
        while await self._do(running.count_open):
            if self.host.stopping.is_set():
                await self._give_back()
                return
            await self._beat()
            await self._settle()
            if self.batch.ending == "completed":
                await self._start_lines()
            else:
                await self._stop_lines()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.host.stopping.wait(), _TICK_S)
        keep_s = files.KEEP_S if self.host.settings.retention_s is None else self.host.settings.retention_s
        finish = partial(outputs.finish, self.host.db, self.host.artifacts, keep_s=min(files.KEEP_S, keep_s))
        ended = await self._with_beat(lambda: finish(self.batch.id, self.host.worker))
        counts = f"{ended.completed} completed, {ended.failed} failed of {ended.total}"
        logger.info("batch %s: %s, %s", self.batch.id, ended.status, counts)

    async def _ingest(self) -> bool:
        """Read the input file into lines; False if the batch has failed by it."""
        lines = await self._with_beat(self._read)
        most = self.host.settings.max_batch_lines
        if lines and len(lines) <= most:
            await asyncio.to_thread(running.ingest, self.host.db, self.batch, self.host.worker, lines)
            return True
        if lines is None:
            error: dict[str, Any] = {"code": "file_not_found", "message": "The input file is not there any more."}
        elif lines:
            message = f"The file has more than {most} requests."
            error = {"code": "too_many_lines", "message": message, "line": lines[most].number}
        else:
            error = {"code": "empty_file", "message": _BAD_FILE}
        said = {"param": "input_file_id", "line": None, **error}
        await asyncio.to_thread(running.fail, self.host.db, self.batch.id, self.host.worker, [said])
        logger.info("batch %s: failed, %s", self.batch.id, error["code"])
        return False

    def _read(self) -> list[LineSpec] | None:
        """Read every line, and no more than one too many; None if the file is gone."""
        try:
            chunks = self.host.artifacts.read(self._key())
            lines: list[LineSpec] = []
            for line in read_lines(chunks, self.batch.endpoint, max_body_bytes=self.host.settings.max_body_bytes):
                lines.append(line)
                if len(lines) > self.host.settings.max_batch_lines:
                    break
            return lines
        except NotFound:
            return None

    def _key(self) -> str:
        if not self._input_key:
            with self.host.db.read() as tx:
                self._input_key = files.load(tx, self.batch.input_file_id).key
        return self._input_key

    async def _start_lines(self) -> None:
        """Send lines while there is room: little of an owner at a time, and never all that its key may have."""
        going_on = await self._do(partial(running.lines_with_jobs, has_ended=False))
        self._count_jobs(len(going_on))
        room = await self._room()
        if room <= 0:
            return
        taken = await asyncio.to_thread(
            running.begin_lines, self.host.db, self.batch.id, self.host.worker, room
        )
        for line in taken:
            self.host.under_way[self.batch.owner_key_id] += 1
            task = asyncio.create_task(self._send(line))
            self._tasks[line.number] = task
            task.add_done_callback(partial(self._sent, line.number))

    async def _room(self) -> int:
        owner = self.batch.owner_key_id
        room = self.host.settings.batch_lines_at_once - self.host.under_way[owner]
        if owner is None or room <= 0:
            return room
        key = await asyncio.to_thread(find_valid_key, self.host.db, owner)
        if key is None:
            # each line says so
            return room
        if ENDPOINTS[self.batch.endpoint] == "job":
            if key.limits.queued_jobs is not None:
                room = min(room, max(1, key.limits.queued_jobs // 2) - self.host.under_way[owner])
        elif key.limits.text_streams is not None:
            held = await count_slots(self.host.app.state.redis, owner) or 0
            # one is left for whoever waits for an answer
            room = min(room, max(1, key.limits.text_streams - 1) - max(held, self.host.under_way[owner]))
        return room

    async def _send(self, line: Line) -> None:
        """Send a line, and write down what follows."""
        host, batch = self.host, self.batch
        text = await asyncio.to_thread(self._text, line)
        left_s = batch.expires_at - await asyncio.to_thread(_now, host.db)
        # an engine by URL has no priorities
        is_remote = ENDPOINTS[batch.endpoint] == "text" and host.settings.engine_url is not None
        body = request_body(text, priority=None if is_remote else PRIORITY)
        answer = await send_line(host.app, batch, host.worker, line.number, body, tries=line.tries, left_s=left_s)
        if answer.retry_in_s is not None:
            logger.info("batch %s line %d: %d, again later", batch.id, line.number, answer.status_code)
            await asyncio.to_thread(
                running.put_back, host.db, batch.id, host.worker, line.number, answer.retry_in_s
            )
        elif ENDPOINTS[batch.endpoint] == "text" or not answer.is_success:
            await self._end_answered(line, answer)

    def _text(self, line: Line) -> bytes:
        return b"".join(self.host.artifacts.read(self._key(), line.start, line.start + line.length))

    async def _end_answered(self, line: Line, answer: LineAnswer) -> None:
        usage = answer.body.get("usage") if answer.is_success and isinstance(answer.body, dict) else None
        used = usage or {}
        record = answered(self.batch.id, line.number, line.custom_id, answer.status_code, answer.body)
        await asyncio.to_thread(
            running.end_line,
            self.host.db,
            self.batch.id,
            self.host.worker,
            line.number,
            record,
            is_error=not answer.is_success,
            input_tokens=used.get("prompt_tokens", 0),
            output_tokens=used.get("completion_tokens", 0),
        )

    def _sent(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(number, None)
        self.host.under_way[self.batch.owner_key_id] -= 1
        if task.cancelled() or (error := task.exception()) is None or isinstance(error, BatchLost):
            return
        logger.error("batch %s line %d: sending failed", self.batch.id, number, exc_info=error)
        again = asyncio.create_task(self._again(number))
        self._tasks[number] = again
        self.host.under_way[self.batch.owner_key_id] += 1
        again.add_done_callback(partial(self._sent, number))

    async def _again(self, number: int) -> None:
        await asyncio.sleep(_TICK_S)
        await asyncio.to_thread(running.put_back, self.host.db, self.batch.id, self.host.worker, number, _TICK_S)

    async def _settle(self) -> None:
        """End the lines whose jobs have ended."""
        for line in await self._do(partial(running.lines_with_jobs, has_ended=True)):
            record, is_error = await asyncio.to_thread(self._describe, line)
            await asyncio.to_thread(
                running.end_line,
                self.host.db,
                self.batch.id,
                self.host.worker,
                line.number,
                record,
                is_error=is_error,
            )

    def _describe(self, line: Line) -> tuple[str, bool]:
        """Write the record of a line whose job has ended; returns it, and whether it is an error's."""
        fail = partial(failed, self.batch.id, line.number, line.custom_id)
        try:
            job = store.get(self.host.db, line.job_id or "")
        except NotFound:
            return fail(None, "job_deleted", f"{line.job_id}, which this line made, was deleted."), True
        body = _job_object(self.host.db, job)
        if job.status is Status.COMPLETED:
            said = body.model_dump(mode="json")
            return answered(self.batch.id, line.number, line.custom_id, 200, said), False
        if job.status is Status.FAILED:
            return fail(body, job.error_code or "internal_error", job.error_message or ""), True
        reason = _ENDS.get(self.batch.ending, ("job_cancelled", f"{job.id} was cancelled."))
        return fail(body, *reason), True

    async def _stop_lines(self) -> None:
        """End what was not sent, break off text, and cancel jobs; those end once their workers have stopped."""
        await self._break_off()
        code, message = _ENDS[self.batch.ending]
        end = partial(running.end_unsent, code=code, message=message)
        await self._do(end, is_mine=True)
        for line in await self._do(partial(running.lines_with_jobs, has_ended=False)):
            with contextlib.suppress(NotFound):
                await asyncio.to_thread(store.request_cancel, self.host.db, line.job_id or "")

    async def _break_off(self) -> None:
        await end_tasks(*self._tasks.values())

    async def _give_back(self) -> None:
        await self._break_off()
        await asyncio.to_thread(running.release, self.host.db, self.batch.id, self.host.worker)
        logger.info("batch %s: given back", self.batch.id)

    def _count_jobs(self, count: int) -> None:
        self.host.under_way[self.batch.owner_key_id] += count - self._jobs_counted
        self._jobs_counted = count

    async def _beat(self) -> None:
        now = asyncio.get_running_loop().time()
        # a cancel is noticed within a second; the lease is long
        if now - self._beat_at < min(1.0, self.host.settings.beat_s):
            return
        self._beat_at = now
        self.batch = await asyncio.to_thread(
            running.beat, self.host.db, self.batch.id, self.host.worker, lease_s=self.host.settings.lease_s
        )

    async def _with_beat(self, work: Callable[[], Found]) -> Found:
        """Do something long in a thread; the lease is renewed meanwhile."""
        working = asyncio.ensure_future(asyncio.to_thread(work))
        while not (await asyncio.wait([working], timeout=self.host.settings.beat_s))[0]:
            beat = partial(running.beat, lease_s=self.host.settings.lease_s)
            await asyncio.to_thread(beat, self.host.db, self.batch.id, self.host.worker)
        return working.result()

    async def _do(self, work: Callable[..., Found], *, is_mine: bool = False) -> Found:
        names = (self.batch.id, self.host.worker) if is_mine else (self.batch.id,)
        return await asyncio.to_thread(work, self.host.db, *names)


def _job_object(db: Database, job: Job) -> BaseModel:
    """Describe a job as its own resource does."""
    if job.kind == "video":
        return video_object(db, job)
    if job.kind == "storyboard":
        return storyboard_object(db, job)
    return film_object(db, job, store.list_jobs(db, parent_id=job.id, order="asc", limit=1000).data)


def _now(db: Database) -> float:
    with db.read() as tx:
        return tx.now()
