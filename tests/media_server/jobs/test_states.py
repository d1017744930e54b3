"""The table of legal moves."""

import itertools

import pytest

from media_server.jobs.states import ACTIVE, TERMINAL, IllegalMove, Status, check_move

# written down by hand from the life cycle, beside the table
LEGAL = {
    ("queued", "in_progress"),
    ("queued", "failed"),
    ("queued", "cancelled"),
    ("in_progress", "queued"),
    ("in_progress", "in_progress"),
    ("in_progress", "completed"),
    ("in_progress", "failed"),
    ("in_progress", "cancelled"),
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(Status, Status)))
def test_moves(old: Status, new: Status) -> None:
    if (old.value, new.value) in LEGAL:
        check_move(old, new)
    else:
        with pytest.raises(IllegalMove, match=f"from {old} to {new}"):
            check_move(old, new)


def test_terminal_states_are_openais_and_cancelled() -> None:
    assert set(TERMINAL) == {"completed", "failed", "cancelled"}
    assert set(ACTIVE) == {"queued", "in_progress"}
    assert not Status.QUEUED.is_terminal
    assert Status.CANCELLED.is_terminal
