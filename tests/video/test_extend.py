"""The frame rule and the plan of a chain."""

import random

import pytest

from video.errors import InvalidClip
from video.extend import MAX_SEED, fit_frames, plan_segments, segment_seed


@pytest.mark.parametrize(
    ("asked", "made"), [(1, 1), (2, 5), (5, 5), (6, 9), (32, 33), (33, 33), (80, 81), (81, 81), (120, 121)]
)
def test_the_next_count_of_the_rule(asked: int, made: int) -> None:
    assert fit_frames(asked) == made


def test_a_single_clip_is_one_segment() -> None:
    (segment,) = plan_segments(32, 7, max_frames=57)
    assert (segment.num_frames, segment.overlap_frames, segment.made_frames, segment.seed) == (32, 0, 33, 7)
    with pytest.raises(InvalidClip, match="at most 57 in one piece"):
        plan_segments(58, 7, max_frames=57)


def test_chains_sum_up_and_keep_the_rule() -> None:
    draw = random.Random(0)
    for _ in range(200):
        count, overlap = draw.randint(2, 6), draw.choice([1, 5, 9])
        frames = [draw.randint(1, 57 - overlap) for _ in range(count)]
        segments = plan_segments(sum(frames), 3, max_frames=57, segment_frames=frames, overlap_frames=overlap)
        assert [segment.num_frames for segment in segments] == frames
        assert segments[0].overlap_frames == 0
        for segment in segments:
            assert segment.made_frames % 4 == 1
            assert 0 <= segment.made_frames - segment.overlap_frames - segment.num_frames < 4
            assert segment.made_frames <= 57


def test_behind_a_source_every_segment_overlaps() -> None:
    segments = plan_segments(100, 3, max_frames=57, overlap_frames=5, has_source=True)
    assert [segment.overlap_frames for segment in segments] == [5, 5]
    assert [segment.num_frames for segment in segments] == [50, 50]
    # the front plans without counting the source's overlap
    (segment,) = plan_segments(57, 3, max_frames=57, segment_frames=[57], overlap_frames=5, has_source=True)
    assert segment.made_frames == 65


def test_what_cannot_be_chained_is_refused() -> None:
    with pytest.raises(InvalidClip, match=r"segment_frames: must sum to num_frames 10, got \[4, 5\]"):
        plan_segments(10, 0, max_frames=9, segment_frames=[4, 5])
    with pytest.raises(InvalidClip, match=r"overlap_frames: must be 4k\+1, got 4"):
        plan_segments(10, 0, max_frames=9, segment_frames=[5, 5], overlap_frames=4)
    with pytest.raises(InvalidClip, match="leaves a segment nothing to add"):
        plan_segments(10, 0, max_frames=9, overlap_frames=9, has_source=True)
    with pytest.raises(InvalidClip, match="num_frames: must be at least 1"):
        plan_segments(0, 0, max_frames=9)


def test_seeds_differ_and_follow_from_the_clips() -> None:
    seeds = [segment_seed(11, index) for index in range(50)]
    assert seeds[0] == 11
    assert len(set(seeds)) == 50
    assert all(0 <= seed < MAX_SEED for seed in seeds)
    assert seeds == [segment_seed(11, index) for index in range(50)]
