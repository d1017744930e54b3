"""Storyboards of twenty ideas by the embedded models as they are shipped, judged: what the service promises of them.

`python -m workers.storyboard_check` shows the same, with the texts.
"""

import json
import time
from pathlib import Path

import pytest

from media_server.models.card import VideoCard, parse_card
from media_server.settings import Settings
from tests.llm.embedded import embedded_model
from video.tiny.captions import WORDS, split
from workers.storyboard_check import judge, load_writer, read_ideas, write_all

__all__ = ["embedded_model"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_twenty_ideas_become_storyboards(embedded_model: Path, tmp_path: Path) -> None:
    assets = Settings(data_dir=tmp_path).assets_dir()
    # the card that a film's storyboard follows on a fresh machine, and no other
    card = parse_card(json.loads((assets / "tiny_wan" / "card.json").read_text()))
    assert isinstance(card, VideoCard)
    ideas = read_ideas(assets / "storyboards" / "ideas.jsonl")
    assert len(ideas) == 20
    assert len({idea.idea for idea in ideas}) == 20
    writer = load_writer(embedded_model)
    started = time.monotonic()
    try:
        storyboards = write_all(writer, card, ideas, seed=0)
    finally:
        writer.close()
    verdict = judge(ideas, storyboards, card, time.monotonic() - started)
    assert verdict.is_good, verdict
    assert (verdict.num_shots, verdict.num_storyboards) == (60, 20)
    # a second opinion on faithfulness and validity, by the words alone
    prompts = [shot["prompt"] for board in storyboards for shot in board["shots"]]
    said = [(idea, shot["prompt"]) for idea, board in zip(ideas, storyboards, strict=True) for shot in board["shots"]]
    kept = [all(word in split(prompt) for word in (idea.color, idea.kind) if word) for idea, prompt in said]
    assert sum(kept) >= 0.9 * len(kept)
    assert {word for prompt in prompts for word in split(prompt)} <= set(WORDS)
    # the model writes, the rule does not: shots of one storyboard differ, titles too
    assert len({board["title"] for board in storyboards}) >= 15
    assert len(set(prompts)) >= 2 * len(storyboards)
    writer.engine.check_idle()
