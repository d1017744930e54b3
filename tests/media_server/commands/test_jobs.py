"""The list of jobs as a person reads it."""

import pytest

from media_server.commands.jobs import _show

JOB = {
    "id": "video_01a2321603bf705ebb8a954927e8fc6f",
    "status": "in_progress",
    "stage": "denoise",
    "step": 3,
    "total_steps": 12,
    "progress": 25,
    "queue_position": None,
    "model": "a-model-with-a-name-that-is-long",
    "created_at": 1796136614,
    "error": None,
}


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_a_job_is_a_line_for_programs_and_its_id_is_whole_for_people(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    _show([JOB])
    shown = capsys.readouterr().out
    assert str(JOB["id"]) in shown and "in_progress" in shown
    # no terminal: a row is a line
    assert len(shown.strip().splitlines()) == 2
