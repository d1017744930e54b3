"""What a request for text takes: admitted by its key's limits first, counted as it is written, entered at its end.

Invariants: each request that was accepted is entered once, also one whose client left: the prompt's tokens and those
that were written until then. Its place among the key's streams is held until it has really ended.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import State

from media_server import quotas
from media_server.auth import Caller
from media_server.jobs import ledger
from media_server.jobs.database import Database
from media_server.jobs.spec import UsageRecord
from media_server.tasks import end_tasks
from media_server.text.engine import AsyncEngineClient
from media_server.text.messages import Usage
from media_server.text.reading import EngineUnavailable, Entry, Reading
from media_server.text.slots import HOLD_S, RENEW_S, Slot, take_slot

# for the engine to be told of what was cut, and the ledger of what was used
_CLOSE_S = 3.0


class Meter:
    """Counts one request; made by `open_meter`, closed by whoever ends the request."""

    def __init__(
        self,
        db: Database,
        owner: Caller,
        label: str | None,
        model: str,
        request_id: str,
        slot: Slot | None,
        open_meters: "set[Meter]",
    ) -> None:
        self._db = db
        self._owner = owner
        self._label = label
        self._model = model
        self._request_id = request_id
        self._slot = slot
        self._renewed_at = time.monotonic()
        self._is_open = True
        self._has_closed = asyncio.Event()
        # a task that nobody holds may be collected
        self._following: asyncio.Task[None] | None = None
        self._open_meters = open_meters
        open_meters.add(self)
        self._reading: Reading | None = None
        # of a request that no engine of ours reads: as its server says
        self._usage: Usage | None = None
        self.prompt_tokens = 0

    async def watch(self, client: AsyncEngineClient, reading: Reading) -> AsyncIterator[Entry | None]:
        """Read a request's events; its place is renewed meanwhile."""
        self._reading = reading
        async for entry in client.events(reading):
            await self.renew()
            yield entry

    def count(self, usage: Usage) -> None:
        """Take what a server by URL says that the request has used so far."""
        self._usage = usage

    async def close(self) -> None:
        """Enter what was used and free the place; once."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._slot is not None:
                await self._slot.give_back()
            if (used := self._used()) is not None:
                records = [
                    UsageRecord("prompt_tokens", used.prompt_tokens),
                    UsageRecord("completion_tokens", used.completion_tokens),
                ]
                enter = partial(ledger.enter_text, self._db, self._owner.owner_key_id, self._label, self._model)
                await run_in_threadpool(enter, self._request_id, records)
        finally:
            self._open_meters.discard(self)
            self._has_closed.set()

    def follow(self, client: AsyncEngineClient, reading: Reading) -> None:
        """Go on counting a request whose client has left, until it ends by itself."""
        self._following = asyncio.create_task(self._drain(client, reading))

    async def wait_closed(self) -> None:
        """Wait until it is closed; a request whose client has left is entered as far as it was read."""
        if self._following is not None:
            await end_tasks(self._following)
            # one that had not begun has closed nothing
            await self.close()
        await self._has_closed.wait()

    async def _drain(self, client: AsyncEngineClient, reading: Reading) -> None:
        try:
            async for _ in self.watch(client, reading):
                pass
        except EngineUnavailable:
            # then it has ended too
            pass
        finally:
            await self.close()

    async def renew(self) -> None:
        """Hold the place for longer, if it is time."""
        if self._slot is None or time.monotonic() - self._renewed_at < RENEW_S:
            return
        self._renewed_at = time.monotonic()
        try:
            await self._slot.renew()
        except EngineUnavailable:
            # a stream does not end for it
            return

    def _used(self) -> Usage | None:
        """Say what the request has used: what its engine counted in the end, or what was read of it."""
        reading = self._reading
        if reading is None or not reading.is_accepted:
            return self._usage
        return reading.usage or Usage(prompt_tokens=self.prompt_tokens, completion_tokens=reading.num_tokens)


async def open_meter(
    state: State, owner: Caller, label: str | None, model: str, request_id: str, *, hold_s: float = HOLD_S
) -> Meter:
    """Admit a request for text.

    Raises RateLimited if a budget of the key is spent or its streams are used up, EngineUnavailable if Valkey, which
    counts them, does not answer.
    """
    slot = None
    if owner.owner_key_id is not None:
        if owner.limits.budgets:
            await run_in_threadpool(_check_budgets, state.db, owner, label)
        if owner.limits.text_streams is not None:
            limit = owner.limits.text_streams
            slot = await take_slot(state.redis, owner.owner_key_id, request_id, limit, hold_s=hold_s)
    return Meter(state.db, owner, label, model, request_id, slot, state.meters)


async def close_meters(open_meters: set[Meter]) -> None:
    """Wait, when the service stops, until the requests that were cut have ended: their engines told, their use entered.

    A request that can be taken up again goes on in its engine; what it writes from here on is not counted.
    """
    waiting = [asyncio.ensure_future(meter.wait_closed()) for meter in open_meters]
    if waiting:
        _, late = await asyncio.wait(waiting, timeout=_CLOSE_S)
        for task in late:
            task.cancel()


def _check_budgets(db: Database, owner: Caller, label: str | None) -> None:
    assert owner.owner_key_id is not None
    with db.read() as tx:
        quotas.check_budgets(tx, owner.owner_key_id, owner.limits, label)
