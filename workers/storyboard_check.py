"""Storyboards of twenty ideas, judged: `python -m workers.storyboard_check`.

Each idea names a thing and its colour (or leaves one of them open): the share of shots whose prompt says both is
counted, each prompt is read back by the caption style's slots, no two storyboards may be equal, and frames must sum.
"""

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llm.checkpoints.embedded import NAME, ensure_embedded
from llm.engine import Engine
from llm.load import load_engine
from llm.request import Grammar, Output, Request, SamplingParams
from media_server.ids import new_id
from media_server.models.card import VideoCard, parse_card
from media_server.settings import load_settings
from media_server.text.caption import parse_sentence
from media_server.text.storyboard import Ask, Task, write_storyboard
from media_server.text.templates import TextModel, compile_template
from workers.text_card import text_card

SECONDS, SHOTS = 8.0, 3


@dataclass(frozen=True)
class Idea:
    """An idea, and the colour and the kind that it names, None where it leaves them open."""

    idea: str
    color: str | None
    kind: str | None


@dataclass(frozen=True)
class Verdict:
    """What was found in all storyboards together."""

    num_shots: int
    num_faithful: int
    num_valid: int
    num_exact: int
    num_distinct: int
    num_storyboards: int
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether the storyboards are as the service promises."""
        return (
            self.num_faithful >= 0.9 * self.num_shots
            and self.num_valid == self.num_shots
            and self.num_exact == self.num_distinct == self.num_storyboards
        )


class LocalWriter:
    """Writes texts of many threads through one engine, batched."""

    def __init__(self, engine: Engine, model: TextModel) -> None:
        self.engine = engine
        self.model = model
        self._new: queue.Queue[tuple[Request, queue.Queue[Output]]] = queue.Queue()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, ask: Ask) -> Iterator[str]:
        """Yield the text as it is written."""
        outputs: queue.Queue[Output] = queue.Queue()
        sampling = SamplingParams(
            max_tokens=ask.max_tokens, seed=ask.seed, temperature=ask.temperature, top_p=ask.top_p
        )
        token_ids = tuple(self.model.encode_chat(ask.messages))
        grammar = Grammar(ask.grammar.type, ask.grammar.value)
        self._new.put((Request(new_id("req"), token_ids, sampling, grammar), outputs))
        while True:
            output = outputs.get(timeout=600)
            yield output.text
            if output.finish_reason is not None:
                return

    def close(self) -> None:
        """Stop the thread."""
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        readers: dict[str, queue.Queue[Output]] = {}
        while not self._is_over:
            try:
                while True:
                    request, outputs = self._new.get(timeout=0.0 if self.engine.has_work else 0.05)
                    readers[request.id] = outputs
                    self.engine.add_request(request)
            except queue.Empty:
                pass
            if self.engine.has_work:
                self.engine.launch()
                for output in self.engine.collect():
                    readers[output.request_id].put(output)


def read_ideas(path: Path) -> list[Idea]:
    """Read ideas, one JSON object a line."""
    return [Idea(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]


def write_all(writer: LocalWriter, card: VideoCard, ideas: Sequence[Idea], seed: int) -> list[dict[str, Any]]:
    """Write a storyboard of each idea, all at once."""

    def write(number: int) -> dict[str, Any]:
        task = Task(
            ideas[number].idea, round(SECONDS * card.fps), card.fps, seed=seed + number, card=card, num_shots=SHOTS
        )
        steps = write_storyboard(task, writer.write)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                storyboard: dict[str, Any] = end.value
                return storyboard

    with ThreadPoolExecutor(len(ideas)) as threads:
        return list(threads.map(write, range(len(ideas))))


def judge(ideas: Sequence[Idea], storyboards: Sequence[dict[str, Any]], card: VideoCard, seconds: float) -> Verdict:
    """Count what the storyboards keep of their promises."""
    assert card.caption_style is not None and card.caption_style.slots is not None
    slots = card.caption_style.slots
    shots = [(idea, shot) for idea, board in zip(ideas, storyboards, strict=True) for shot in board["shots"]]
    sentences = [(idea, parse_sentence(shot["prompt"], slots)) for idea, shot in shots]
    faithful = [
        sentence
        for idea, sentence in sentences
        if sentence and idea.color in (None, sentence.color) and idea.kind in (None, sentence.kind)
    ]
    total = round(SECONDS * card.fps)
    return Verdict(
        num_shots=len(shots),
        num_faithful=len(faithful),
        num_valid=sum(sentence is not None for _, sentence in sentences),
        num_exact=sum(sum(shot["num_frames"] for shot in board["shots"]) == total for board in storyboards),
        num_distinct=len({json.dumps([shot["prompt"] for shot in board["shots"]]) for board in storyboards}),
        num_storyboards=len(storyboards),
        seconds=seconds,
    )


def load_writer(folder: Path, device: str = "cpu") -> LocalWriter:
    """Load a converted model folder as a writer."""
    engine = load_engine(folder, device)
    entry = load_settings().models[-1].model_copy(update={"name": folder.name, "kind": "text"})
    template = compile_template((folder / "chat_template.jinja").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return LocalWriter(engine, TextModel(text_card(engine, entry, folder), tokenizer, template))


def main(argv: Sequence[str]) -> int:
    """Write and judge the storyboards of the committed ideas."""
    settings = load_settings()
    parser = argparse.ArgumentParser(prog="python -m workers.storyboard_check", description=main.__doc__)
    parser.add_argument("--ideas", type=Path, default=settings.assets_dir() / "storyboards" / "ideas.jsonl")
    parser.add_argument("--card", type=Path, default=settings.assets_dir() / "tiny_wan" / "card.json")
    parser.add_argument("--model", type=Path, default=settings.data_dir / "models" / NAME, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    card = parse_card(json.loads(arguments.card.read_text()))
    if not isinstance(card, VideoCard) or card.caption_style is None or not card.caption_style.slots:
        print("the card must be a video model's, with a caption style of slots", file=sys.stderr)
        return 2
    ensure_embedded(arguments.model)
    writer = load_writer(arguments.model)
    ideas = read_ideas(arguments.ideas)
    started = time.monotonic()
    storyboards = write_all(writer, card, ideas, arguments.seed)
    verdict = judge(ideas, storyboards, card, time.monotonic() - started)
    writer.close()
    for idea, board in zip(ideas, storyboards, strict=True):
        print(f"{idea.idea}\n  {board['title']}")
        for shot in board["shots"]:
            print(f"    {shot['num_frames']:3d} frames  {shot['prompt']}")
    print(
        f"colour and object kept in {verdict.num_faithful} of {verdict.num_shots} shots; valid prompts "
        f"{verdict.num_valid}; exact lengths {verdict.num_exact} of {verdict.num_storyboards}; distinct "
        f"{verdict.num_distinct}; {verdict.seconds:.1f} s"
    )
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
