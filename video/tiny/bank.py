"""Training material of the tiny world: scenes and captions made ahead by worker processes, clips drawn on the device.

Invariants: material is a function of (split, first seed, count); captions are token ids of `MAX_TOKENS` a row. Worker
processes are forked before CUDA is touched, and draw nothing themselves.
"""

import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import Pool
from typing import Any

import numpy as np
import torch
from torch import Tensor

from video.tiny import captions
from video.tiny.draw import draw
from video.tiny.tokenizer import EOS, MAX_TOKENS, PAD, UNK, split_words
from video.tiny.world import Scene, sample_scene

SCENES_A_JOB = 128
_WORD_IDS = {word: index for index, word in enumerate([PAD, EOS, UNK, *captions.WORDS])}


@dataclass(frozen=True)
class Job:
    """What one worker makes: `count` scenes from `first_seed`, each said `captions_each` times."""

    split: str
    first_seed: int
    count: int
    captions_each: int
    filler: float = 0.0


@dataclass(frozen=True)
class Said:
    """Scenes and what is said of them: ids `[count, captions_each, MAX_TOKENS]` int16."""

    scenes: list[Scene]
    ids: np.ndarray[Any, Any]


def start_workers(count: int) -> Pool | None:
    """Fork worker processes, or return None for zero; call it before CUDA is touched."""
    return multiprocessing.get_context("fork").Pool(count) if count > 0 else None


def say(job: Job) -> Said:
    """Sample and caption the scenes of a job."""
    scenes = [sample_scene(job.first_seed + index, job.split) for index in range(job.count)]
    ids = np.zeros((job.count, job.captions_each, MAX_TOKENS), dtype=np.int16)
    for index, scene in enumerate(scenes):
        for turn in range(job.captions_each):
            text = captions.caption(scene, scene.seed * 1000 + turn)
            ids[index, turn] = _row(text)
    return Said(scenes, ids)


def label(job: Job) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Caption the scenes of a job with labels a word.

    Returns:
        ids `[count * captions_each, MAX_TOKENS]` int16 and labels `[count * captions_each, MAX_TOKENS, A]` int8, where
        A follows `captions.ATTRIBUTES` and -1 means that a token says nothing of it.
    """
    rows = job.count * job.captions_each
    ids = np.zeros((rows, MAX_TOKENS), dtype=np.int16)
    labels = np.full((rows, MAX_TOKENS, len(captions.ATTRIBUTES)), -1, dtype=np.int8)
    for row in range(rows):
        scene = sample_scene(job.first_seed + row // job.captions_each, job.split)
        text, meant = captions.phrases(scene, scene.seed * 1000 + 500 + row % job.captions_each, job.filler)
        ids[row] = _row(text)
        labels[row, : min(len(meant), MAX_TOKENS - 1)] = np.array(meant[: MAX_TOKENS - 1])
    return ids, labels


def jobs(split: str, first_seed: int, scenes: int, captions_each: int, filler: float = 0.0) -> list[Job]:
    """Cut a range of seeds into jobs of at most `SCENES_A_JOB` scenes."""
    return [
        Job(split, first_seed + start, min(SCENES_A_JOB, scenes - start), captions_each, filler)
        for start in range(0, scenes, SCENES_A_JOB)
    ]


def say_all(pool: Pool | None, todo: Iterable[Job]) -> Iterator[Said]:
    """Run `say` on jobs in order, ahead of the reader where there are workers."""
    return pool.imap(say, todo) if pool is not None else map(say, todo)


def label_all(pool: Pool | None, todo: list[Job]) -> tuple[Tensor, Tensor]:
    """Run `label` on all jobs: ids `[R, MAX_TOKENS]` int64 and labels `[R, MAX_TOKENS, A]` int64."""
    made = pool.map(label, todo, chunksize=1) if pool is not None else list(map(label, todo))
    ids, labels = zip(*made, strict=True)
    return torch.from_numpy(np.concatenate(ids)).long(), torch.from_numpy(np.concatenate(labels)).long()


def draw_clips(
    said: Iterable[Said], num_frames: int, height: int, width: int, device: torch.device, count: int
) -> Tensor:
    """Draw the first `count` scenes: `[count, T, H, W, 3]` uint8 on the device."""
    clips: list[Tensor] = []
    drawn = 0
    for part in said:
        clips.append(draw(part.scenes[: count - drawn], num_frames, height, width, device=device))
        drawn += len(clips[-1])
        if drawn >= count:
            break
    return torch.cat(clips)


def _row(text: str) -> np.ndarray[Any, Any]:
    row = np.zeros(MAX_TOKENS, dtype=np.int16)
    words = [_WORD_IDS.get(word, _WORD_IDS[UNK]) for word in split_words(text)[: MAX_TOKENS - 1]]
    row[: len(words) + 1] = [*words, _WORD_IDS[EOS]]
    return row
