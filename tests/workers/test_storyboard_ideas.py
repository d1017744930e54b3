"""Storyboards of twenty ideas by the embedded language model, judged: what the service promises of them.

`python -m workers.storyboard_check` shows the same, with the texts.
"""

import time
from pathlib import Path

import pytest

from media_server.settings import Settings
from tests.llm.embedded import embedded_model
from tests.media_server.text.conftest import VIDEO_CARD
from video.tiny.captions import WORDS, split
from workers.storyboard_check import judge, load_writer, read_ideas, write_all

__all__ = ["embedded_model"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_twenty_ideas_become_storyboards(embedded_model: Path, tmp_path: Path) -> None:
    ideas = read_ideas(Settings(data_dir=tmp_path).assets_dir() / "storyboards" / "ideas.jsonl")
    assert len(ideas) == 20
    assert len({idea.idea for idea in ideas}) == 20
    writer = load_writer(embedded_model)
    started = time.monotonic()
    try:
        storyboards = write_all(writer, VIDEO_CARD, ideas, seed=0)
    finally:
        writer.close()
    verdict = judge(ideas, storyboards, VIDEO_CARD, time.monotonic() - started)
    assert verdict.num_faithful >= 0.9 * verdict.num_shots
    assert verdict.num_valid == verdict.num_shots == 60
    assert verdict.num_exact == verdict.num_distinct == 20
    # a second opinion on faithfulness and validity, by the words alone
    prompts = [shot["prompt"] for board in storyboards for shot in board["shots"]]
    said = [(idea, shot["prompt"]) for idea, board in zip(ideas, storyboards, strict=True) for shot in board["shots"]]
    kept = [all(word in split(prompt) for word in (idea.color, idea.kind) if word) for idea, prompt in said]
    assert sum(kept) >= 0.9 * len(kept)
    assert {word for prompt in prompts for word in split(prompt)} <= set(WORDS)
    # the model writes, the rule does not: shots of one storyboard differ, titles too
    assert len({board["title"] for board in storyboards}) >= 15
    assert len(set(prompts)) >= 45
    writer.engine.check_idle()
