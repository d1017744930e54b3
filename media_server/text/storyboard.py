"""Storyboards: an idea becomes a title, characters, a palette and shots whose prompts the video model understands.

The language model writes JSON that a grammar holds to the plan's schema (storyboard_plan.py), so it always parses. The
writer gives each shot a pace, the rule splits the frames. Invariants: the frames sum exactly, and no shot is longer
than the video model's clips may be.
"""

import json
import re
import unicodedata
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from media_server.text.caption import parse_sentence, phrase
from media_server.text.storyboard_plan import (
    PACES,
    Ask,
    Plan,
    StoryboardError,
    Task,
    Writer,
    choose_subjects,
    slots_of,
)
from media_server.text.subjects import Subject

__all__ = ["Ask", "StoryboardError", "Task", "Writer", "split_frames", "write_storyboard"]

STORYBOARD_VERSION = 1
# shots written in one go: a longer storyboard is continued
SHOTS_PER_TEXT = 12
# white space among the control characters: what it parts stays parted
_SPACES = re.compile(r"\s*[\t\n\v\f\r\x1c-\x1f\x85]\s*")


def write_storyboard(task: Task, write: Writer) -> Generator[str, None, dict[str, Any]]:
    """Write a storyboard; yields the text as it is written ("" for a sign of life), returns the storyboard.

    Raises StoryboardError if the text is not complete, or the shots cannot hold the frames; whatever `write` raises
    passes through.
    """
    most = task.shots * task.card.limits.max_frames(task.fps)
    if task.num_frames > most:
        raise StoryboardError(f"{task.shots} shots of {task.card.name} hold {most} frames, not {task.num_frames}.")
    style = task.card.caption_style
    slots = slots_of(style)
    subjects: list[Subject] = []
    if slots is not None:
        subjects = yield from choose_subjects(task, slots, write)
    plan = Plan(task, slots, subjects)
    written: list[dict[str, Any]] = []
    frame: dict[str, Any] = {}
    while len(written) < task.shots:
        count = min(SHOTS_PER_TEXT, task.shots - len(written))
        schema = plan.schema(len(written), count)
        text = ""
        for delta in write(plan.ask(schema, written, count)):
            text += delta
            yield delta
        part = _parse(text, count)
        frame = frame or part
        written += part["shots"]
    return _assemble(plan, frame, written)


def split_frames(total: int, weights: Sequence[float], *, most: int) -> list[int]:
    """Split frames by weights: largest remainders, from one to `most` each, the sum exact.

    What a shot cannot take goes to the others, by their weights. `total` is from one to `most` times the number of
    weights.
    """
    assert 0 < len(weights) <= total <= most * len(weights), f"split_frames: {total} in {len(weights)} of {most}"
    counts = _split(total, weights)
    full = [count >= most for count in counts]
    if not any(count > most for count in counts):
        return counts
    rest = [weight for weight, is_full in zip(weights, full, strict=True) if not is_full]
    others = iter(split_frames(total - most * sum(full), rest, most=most) if rest else [])
    return [most if is_full else next(others) for is_full in full]


def _split(total: int, weights: Sequence[float]) -> list[int]:
    spare = total - len(weights)
    shares = [spare * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda index: (counts[index] - shares[index], index))
    for index in by_remainder[: spare - sum(counts)]:
        counts[index] += 1
    return [count + 1 for count in counts]


def _parse(text: str, count: int) -> dict[str, Any]:
    try:
        part = _clean(json.loads(text))
        if len(part["shots"]) != count:
            raise StoryboardError(f"The storyboard has {len(part['shots'])} shots, {count} were asked for.")
        if not all(shot["prompt"] for shot in part["shots"]):
            raise StoryboardError("A shot of the storyboard has no words.")
    except (ValueError, KeyError, TypeError):
        raise StoryboardError(f"The storyboard's text of {len(text)} characters is not complete.") from None
    return dict(part)


def _clean(value: Any) -> Any:
    """Take control characters out of each string: a grammar without slots, or another engine, lets them through.

    A line break or a tab parts words, so it becomes a space. Raises StoryboardError for half a surrogate pair, which
    no database and no file takes.
    """
    if isinstance(value, dict):
        return {name: _clean(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_clean(member) for member in value]
    if not isinstance(value, str):
        return value
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise StoryboardError("The storyboard's text holds half a surrogate pair.")
    spaced = _SPACES.sub(" ", value)
    return "".join(character for character in spaced if unicodedata.category(character) != "Cc").strip()


def _assemble(plan: Plan, frame: Mapping[str, Any], written: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    task = plan.task
    paces = [PACES.get(str(shot.get("pace")), 1.0) for shot in written]
    counts = split_frames(task.num_frames, paces, most=min(task.longest, task.card.limits.max_frames(task.fps)))
    shots = [
        {
            "index": index,
            "prompt": shot["prompt"],
            "seconds": round(count / task.fps, 6),
            "num_frames": count,
            "camera": _camera(plan, shot),
            "transition": shot["transition"],
            "notes": shot["notes"],
        }
        for index, (shot, count) in enumerate(zip(written, counts, strict=True))
    ]
    assert sum(counts) == task.num_frames
    return {
        "v": STORYBOARD_VERSION,
        "title": frame["title"],
        "idea": task.idea,
        "style": task.style,
        "seconds": task.num_frames / task.fps,
        "fps": task.fps,
        "characters": [{"name": person["name"], "look": person["look"]} for person in frame["characters"]],
        "palette": frame["palette"],
        "shots": shots,
    }


def _camera(plan: Plan, shot: Mapping[str, Any]) -> str:
    """Say what the camera does: the writer's choice, or what the prompt's sentence says."""
    if plan.slots is None:
        return str(shot["camera"])
    sentence = parse_sentence(shot["prompt"], plan.slots)
    said = sentence.camera if sentence is not None else ""
    moves = [value for value in plan.slots.get("camera", ()) if said and phrase("camera", value, plan.slots) == said]
    return moves[0].removeprefix("the camera ") if moves else "still"
