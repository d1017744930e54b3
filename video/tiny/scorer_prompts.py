"""The list of prompts on which the video model is measured: written once, before any training, then only read.

`python -m video.tiny.scorer_prompts write assets/tiny_world/prompts.jsonl` makes the committed file. Its scenes come
from seeds that training never draws; half of them hold a pair that training never draws.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from video.tiny.captions import caption
from video.tiny.vocabulary import SPLITS
from video.tiny.world import Scene, held_out_pairs, sample_scene

FIRST_SEED = 2_000_000_000  # training draws scenes of lower seeds
PER_SPLIT = 100
# At most so many of a split's prompts: two things, a moving camera, one motion, one kind, one backdrop.
MOST = {"pair": 12, "camera": 10, "motion": 15, "kind": 14, "backdrop": 12}


@dataclass(frozen=True)
class Prompt:
    """A prompt and what its clip must show. The fields without `second_` speak of the first thing.

    relation: how the first thing stands to the second, None for one thing. held_out: the pairs of the scene that
    training never draws, as "kind aspect word". seed: of the scene; the clip's noise is seeded by `id`'s number.
    """

    id: str
    prompt: str
    kind: str
    color: str
    motion: str
    backdrop: str
    split: str
    seed: int
    size: str
    camera: str
    relation: str | None
    second_kind: str | None
    second_color: str | None
    second_motion: str | None
    held_out: tuple[str, ...]


def make_prompts() -> list[Prompt]:
    """Make the list: deterministic, balanced over motions, kinds and backdrops."""
    prompts: list[Prompt] = []
    for split in SPLITS:
        counts: Counter[str] = Counter()
        seed = FIRST_SEED
        while counts["all"] < PER_SPLIT:
            scene = sample_scene(seed, split)
            keys = _keys(scene)
            if all(counts[f"{name} {value}"] < MOST[name] for name, value in keys):
                counts.update([f"{name} {value}" for name, value in keys] + ["all"])
                prompts.append(_prompt(f"{split}-{counts['all']:03d}", scene, seed, split))
            seed += 1
    return prompts


def read_prompts(path: Path) -> list[Prompt]:
    """Read a list of prompts.

    Raises:
        ValueError: a line is not a JSON object with exactly the fields of `Prompt`.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            fields = json.loads(line)
            prompts.append(Prompt(**{**fields, "held_out": tuple(fields["held_out"])}))
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"read_prompts: line {number} of {path.name} is not a prompt: {error}") from error
    return prompts


def _keys(scene: Scene) -> list[tuple[str, str]]:
    thing = scene.things[0]
    keys = [("motion", thing.motion), ("kind", thing.kind), ("backdrop", scene.backdrop)]
    keys += [("pair", "")] if scene.relation is not None else []
    return keys + ([("camera", "")] if scene.camera != "none" else [])


def _prompt(name: str, scene: Scene, seed: int, split: str) -> Prompt:
    first, second = scene.things[0], scene.things[1] if len(scene.things) == 2 else None
    return Prompt(
        id=name,
        prompt=caption(scene, seed),
        kind=first.kind,
        color=first.color,
        motion=first.motion,
        backdrop=scene.backdrop,
        split=split,
        seed=seed,
        size=first.size,
        camera=scene.camera,
        relation=scene.relation,
        second_kind=second.kind if second else None,
        second_color=second.color if second else None,
        second_motion=second.motion if second else None,
        held_out=tuple(" ".join(pair) for pair in held_out_pairs(scene)),
    )


def main(argv: Sequence[str]) -> int:
    """Write the list: `write FILE`."""
    if len(argv) != 2 or argv[0] != "write":
        print("usage: python -m video.tiny.scorer_prompts write FILE", file=sys.stderr)
        return 2
    lines = [json.dumps(asdict(prompt), ensure_ascii=False) for prompt in make_prompts()]
    Path(argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
