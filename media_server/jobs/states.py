"""States of a job, and the one table of legal moves between them.

    queued ──claim──► in_progress ──► completed | failed | cancelled
      ▲                  │  │ ▲
      └─release, retry───┘  └─┘ a new attempt after a lost lease

Invariant: a terminal state is never left.
"""

from enum import StrEnum


class Status(StrEnum):
    """Where a job stands; the first two are OpenAI's, and any other ends its client's polling."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended."""
        return not LEGAL_MOVES[self]


LEGAL_MOVES: dict[Status, frozenset[Status]] = {
    # a film fails while queued if its storyboard is cancelled before it began
    Status.QUEUED: frozenset({Status.IN_PROGRESS, Status.FAILED, Status.CANCELLED}),
    Status.IN_PROGRESS: frozenset(Status),
    Status.COMPLETED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
}

TERMINAL = tuple(status for status in Status if status.is_terminal)
ACTIVE = tuple(status for status in Status if not status.is_terminal)


class IllegalMove(Exception):
    """A transition that the table does not allow: a fault of ours, never of a caller."""


def check_move(old: Status, new: Status) -> None:
    """Raise IllegalMove unless a job may go from `old` to `new`."""
    if new not in LEGAL_MOVES[old]:
        raise IllegalMove(f"a job may not go from {old} to {new}")
