"""Reading a request's stream: what to make of each reply and of silence, without input or output.

The two clients (engine.py) do the reading. Invariant: events come in order, each once, without a gap: an entry whose
predecessor is missing is not taken, since an engine that finds Valkey emptied writes both again.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from media_server.errors import NotReady
from media_server.text.messages import Announcement, Generate, RequestMeta, TextEvent, Usage, outbox_key

# an engine announces itself every 2 s, so this much silence is a Valkey that restarted and an engine that did not
GONE_S = 6.0
# a request that nobody has accepted by then is sent again; the engine takes it once
RESEND_S = 3.0
# how long a Valkey that does not answer is waited for
OUTAGE_S = 30.0


class EngineUnavailable(NotReady):
    """No replica can take the request, or the one that had it has gone."""

    code, title = "engine_unavailable", "No language engine"


class Entry(NamedTuple):
    """An event and its number in the stream, from 1."""

    number: int
    event: TextEvent


class Reading:
    """One reader of one stream."""

    def __init__(self, request_id: str, meta: RequestMeta, after: int = 0, message: Generate | None = None) -> None:
        self.request_id = request_id
        self.meta = meta
        self.after = after
        self.is_over = False
        # what came so far: whether an engine took the request, the tokens that it wrote, its own count at the end
        self.is_accepted = False
        self.num_tokens = 0
        self.usage: Usage | None = None
        # what to send again while nobody has accepted it
        self._message = message
        self._sent_at = self._alive_at = self._answered_at = time.monotonic()
        self._was_out = False

    @property
    def position(self) -> dict[Any, Any]:
        """Argument of XREAD."""
        return {outbox_key(self.request_id): f"{self.after}-0"}

    def take(self, reply: Sequence[Any] | None) -> list[Entry]:
        """Take the entries of a reply, up to a gap."""
        self._answered_at = time.monotonic()
        if self._was_out:
            # a Valkey that comes back empty cannot say who lives: the engine has GONE_S from now on
            self._was_out = False
            self._alive_at = self._answered_at
        entries: list[Entry] = []
        for _, rows in reply or ():
            for entry_id, fields in rows:
                number = int(entry_id.partition(b"-")[0])
                if number != self.after + 1:
                    return entries
                event = TextEvent.model_validate_json(fields[b"d"])
                entries.append(Entry(number, event))
                self.after = number
                self.is_accepted |= event.is_accepted
                self.num_tokens += len(event.token_ids)
                self.usage = event.usage or self.usage
                self._message = None
                self._alive_at = self._answered_at
                if event.is_last:
                    self.is_over = True
                    return entries
        return entries

    def note_outage(self) -> None:
        """Note that Valkey did not answer. Raises EngineUnavailable if that has lasted too long."""
        self._was_out = True
        if time.monotonic() - self._answered_at > OUTAGE_S:
            raise EngineUnavailable("The broker does not answer; try again later.", code="broker_unavailable")

    def check(self, announcement: Announcement | None) -> Generate | None:
        """After silence, look whether the engine still has the request; returns what must be sent again, if anything.

        Raises EngineUnavailable if the engine has gone or has restarted.
        """
        now = time.monotonic()
        if announcement is not None:
            self._alive_at = now
            if announcement.instance != self.meta.instance:
                raise EngineUnavailable("The language engine restarted while it was writing; try again.")
        elif now - self._alive_at > GONE_S:
            raise EngineUnavailable("The language engine went away while it was writing; try again.")
        if self._message is not None and now - self._sent_at > RESEND_S:
            self._sent_at = now
            return self._message
        return None
