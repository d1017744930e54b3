"""Films: a state machine in SQL that the transaction which ends a child takes one step further.

    storyboard ──► shots, all at once ──► joining ──► completed
                     └─ a failed shot is made again with another seed, a few times ──► failed

No task waits for another, so a restart between any two steps loses nothing: what comes next follows from the rows
of the children alone. A film's job is never claimed; its children are ordinary jobs. A film that fails keeps what was
made. The seeds of the shots derive from (film seed, shot, retry).
Invariant: whoever calls holds the lock of the film's family.
"""

from media_server.films.children import MEDIA_POOL, TEXT_POOL, derive_seed
from media_server.films.machine import advance, cancel_job, child_progressed, child_started, end_job
from media_server.films.request import (
    MAX_FILM_SECONDS,
    MAX_IDEA_CHARS,
    MAX_SHOTS,
    FilmRequest,
    parse_film_request,
    submit_film,
)

__all__ = [
    "MAX_FILM_SECONDS",
    "MAX_IDEA_CHARS",
    "MAX_SHOTS",
    "MEDIA_POOL",
    "TEXT_POOL",
    "FilmRequest",
    "advance",
    "cancel_job",
    "child_progressed",
    "child_started",
    "derive_seed",
    "end_job",
    "parse_film_request",
    "submit_film",
]
