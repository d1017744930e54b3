"""A clip's request against its card: what is filled in, what is refused, and what is said to be adjusted."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from media_server.errors import InvalidRequest
from media_server.models.card import VideoCard
from media_server.models.clip import ClipParams, ClipRequest, parse_clip_request, validate_clip
from media_server.models.pricing import estimate_cost


def _validate(card: VideoCard, **values: Any) -> ClipParams:
    return validate_clip(card, parse_clip_request({"prompt": "a red cube", **values}))


def test_what_is_not_said_comes_from_the_card(card: VideoCard) -> None:
    clip = _validate(card)
    assert (clip.size, clip.width, clip.height) == ("160x96", 160, 96)
    assert (clip.fps, clip.num_frames, clip.seconds) == (16, 32, 2.0)
    assert (clip.num_inference_steps, clip.guidance_scale, clip.guidance_scale_2, clip.flow_shift) == (
        8,
        4.0,
        None,
        3.0,
    )
    assert (clip.extend, clip.adjusted, clip.attention.mode, clip.output.codec) == (None, [], "dense", "h264")
    assert clip.model_hash == "sha256:00"
    assert 0 <= clip.seed < 2**53
    assert _validate(card).seed != clip.seed


def test_strings_of_a_form_are_read(card: VideoCard) -> None:
    clip = _validate(card, seconds="1.5", seed="42", fps="24", guidance_scale="2")
    assert (clip.num_frames, clip.seed, clip.fps, clip.guidance_scale) == (36, 42, 24, 2.0)


@pytest.mark.parametrize("num_frames", [1, 2, 30, 33, 57])
def test_the_length_asked_for_is_kept_exactly(card: VideoCard, num_frames: int) -> None:
    clip = _validate(card, num_frames=num_frames)
    assert (clip.num_frames, clip.seconds, clip.extend) == (num_frames, num_frames / 16, None)


@pytest.mark.parametrize(("count", "fitted"), [(1, 1), (2, 5), (5, 5), (6, 9), (33, 33), (54, 57), (57, 57)])
def test_the_model_makes_the_next_count_of_its_rule(card: VideoCard, count: int, fitted: int) -> None:
    assert card.frames.fit(count) == fitted


def test_words_are_kept_apart_from_parameters(card: VideoCard) -> None:
    clip = _validate(
        card, num_frames=100, negative_prompt="canary blur", extend={"segments": 2, "prompts": ["canary a", "canary b"]}
    )
    assert "canary" not in str(clip.params())
    assert "red cube" not in str(clip.params())
    assert clip.prompts() == {
        "prompt": "a red cube",
        "negative_prompt": "canary blur",
        "segment.0": "canary a",
        "segment.1": "canary b",
    }


def test_a_longer_clip_becomes_segments_and_says_so(card: VideoCard) -> None:
    clip = _validate(card, seconds=8)
    assert clip.num_frames == 128
    assert clip.extend is not None
    # 57 + 56 + 15 would do; three of about equal length, each after the first repeating one frame
    assert clip.extend.segment_frames == [44, 42, 42]
    assert (clip.extend.segments, clip.extend.overlap_frames) == (3, 1)
    (adjusted,) = clip.adjusted
    assert (adjusted.param, adjusted.asked) == ("seconds", 8.0)
    assert adjusted.rule == "tiny-wan makes at most 57 frames in one piece"
    assert adjusted.given == "3 chained segments, 128 frames in all"
    assert _validate(card, num_frames=128, extend={"on_drift": "report"}).adjusted == [], "it was asked for"


@given(num_frames=st.integers(1, 960), segments=st.none() | st.integers(1, 12), has_overlap=st.booleans())
def test_segments_always_sum_to_the_clip(num_frames: int, segments: int | None, has_overlap: bool) -> None:
    card = _CARD.model_copy(update={"conditions": ["text", "first_frame", "overlap"]}) if has_overlap else _CARD
    overlap = 5 if has_overlap else 1
    try:
        clip = _validate(
            card, num_frames=num_frames, **({} if segments is None else {"extend": {"segments": segments}})
        )
    except InvalidRequest as refused:
        assert segments is not None
        fewest = 1 if num_frames <= 57 else 1 + math.ceil((num_frames - 57) / (57 - overlap))
        too_thin = num_frames + (segments - 1) * overlap < segments * (overlap + 1)
        assert segments < fewest or too_thin or segments > num_frames
        assert refused.param == "extend.segments"
        return
    frames = [clip.num_frames] if clip.extend is None else clip.extend.segment_frames
    assert sum(frames) == num_frames
    assert min(frames) >= 1
    generated = [frames[0], *(count + overlap for count in frames[1:])]
    assert max(generated) <= 57
    assert max(generated) - min(generated) <= 1
    if segments is not None:
        assert len(frames) == segments


@pytest.mark.parametrize(
    ("values", "num_frames", "segments"),
    [
        ({"extend": {"seconds": 5}}, 80, 2),
        ({"extend": {"segments": 3}}, 32 + 2 * 31, 3),
        ({"seconds": 3, "extend": {"segments": 2}}, 48, 2),
        ({"seconds": 3, "num_frames": 48, "extend": {"seconds": 3}}, 48, 1),
        ({"extend": {"segments": 1}}, 32, 1),
    ],
)
def test_lengths_of_a_chained_clip(card: VideoCard, values: dict[str, Any], num_frames: int, segments: int) -> None:
    clip = _validate(card, **values)
    assert clip.num_frames == num_frames
    assert (clip.extend.segments if clip.extend else 1) == segments


@pytest.mark.parametrize(
    ("values", "param", "rule", "value"),
    [
        ({"prompt": " \n"}, "prompt", "must not be empty", " \n"),
        ({"prompt": "x" * 201}, "prompt", "at most 200 characters", 201),
        ({"prompt": "a\0b"}, "prompt", "must hold neither NUL nor half a surrogate pair", "U+0000 at 1"),
        ({"negative_prompt": "x" * 201}, "negative_prompt", "at most 200 characters", 201),
        ({"size": "160*96"}, "size", "must be WIDTHxHEIGHT in pixels", "160*96"),
        ({"size": "161x96"}, "size", "width must be a multiple of 16", "161x96"),
        ({"size": "160x100"}, "size", "height must be a multiple of 16", "160x100"),
        ({"size": "48x96"}, "size", "width from 64 to 256", "48x96"),
        ({"size": "96x272"}, "size", "height from 64 to 256", "96x272"),
        ({"size": "256x160"}, "size", "at most 36864 pixels", "256x160"),
        ({"fps": 61}, "fps", "from 1 to 60", 61),
        ({"seconds": 0}, "seconds", "Input should be greater than 0", 0),
        ({"seconds": "soon"}, "seconds", "Input should be a valid number, unable to parse string as a number", "soon"),
        ({"seconds": math.inf}, "seconds", "Input should be a finite number", "inf"),
        ({"seconds": 0.01}, "seconds", "at least one frame at 16 fps", 0.01),
        ({"seconds": 61}, "seconds", "at most 60 s, which is 960 frames at 16 fps", 976),
        ({"num_frames": 961}, "num_frames", "at most 60 s, which is 960 frames at 16 fps", 961),
        ({"num_frames": 0}, "num_frames", "Input should be greater than or equal to 1", 0),
        (
            {"seconds": 2, "num_frames": 33},
            "num_frames",
            "lengths must agree at 16 fps",
            {"num_frames": 33, "seconds": 32},
        ),
        ({"seed": 2**53}, "seed", f"Input should be less than {2**53}", 2**53),
        ({"seed": -1}, "seed", "Input should be greater than or equal to 0", -1),
        ({"num_inference_steps": 51}, "num_inference_steps", "at most 50", 51),
        ({"guidance_scale": 31}, "guidance_scale", "at most 30", 31.0),
        ({"guidance_scale_2": 3}, "guidance_scale_2", "tiny-wan has one expert, and so one scale", 3.0),
        ({"attention": {"mode": "sparse"}}, "attention.mode", "tiny-wan offers dense", "sparse"),
        ({"attention": {"density": 0.5}}, "attention.density", "needs mode sparse", 0.5),
        ({"extend": {"segments": 2}, "num_frames": 200}, "extend.segments", "200 frames need at least 4 segments", 2),
        ({"extend": {"segments": 9}, "num_frames": 8}, "extend.segments", "at most one segment a frame, of 8", 9),
        ({"extend": {"overlap_frames": 5}}, "extend.overlap_frames", "tiny-wan continues from one frame", 5),
        (
            {"extend": {"anchor": True}},
            "extend.anchor",
            "is not offered: segments continue from the frames before them alone",
            True,
        ),
        (
            {"inputs": {"first_frame": "k"}, "num_frames": 1},
            "num_frames",
            "must leave something to make beside the frames that are given",
            1,
        ),
        ({"extend": {"on_drift": "retry"}}, "extend.on_drift", "tiny-wan offers report", "retry"),
        ({"extend": {"segments": 2, "prompts": ["a"]}}, "extend.prompts", "one for each of the 2 segments", 1),
        ({"extend": {"segments": 2, "prompts": ["a", ""]}}, "extend.prompts.1", "must not be empty", ""),
        ({"inputs": {"last_frame": "k"}}, "last_frame", "tiny-wan takes text, first_frame", "last_frame"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "keys have at most 64 characters, values at most 512", "k" * 64),
        ({"priority": 101}, "priority", "Input should be less than or equal to 100", 101),
        ({"style": "noir"}, "style", "is not a field of this request", "noir"),
        ({"output": {"codec": "av1"}}, "output.codec", "Input should be 'h264'", "av1"),
    ],
)
def test_what_breaks_a_rule_is_refused(
    card: VideoCard, values: dict[str, Any], param: str, rule: str, value: object
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _validate(card, **values)
    assert (refused.value.param, refused.value.rule, refused.value.value) == (param, rule, value)
    assert param in refused.value.message
    assert rule in refused.value.message


def test_an_image_condition_the_model_lacks_names_the_field_of_the_api(card: VideoCard) -> None:
    text_only = card.model_copy(update={"conditions": ["text"]})
    with pytest.raises(InvalidRequest) as refused:
        _validate(text_only, inputs={"first_frame": "k"})
    assert refused.value.param == "input_reference"
    with pytest.raises(InvalidRequest, match="tiny-wan takes text") as refused:
        _validate(text_only, inputs={"video": "k"})
    assert refused.value.param == "video"
    assert _validate(card, inputs={"video": "k"}).num_frames == 32
    with pytest.raises(InvalidRequest, match="cannot continue a clip: at most 57 frames, got 58"):
        _validate(text_only, num_frames=58)


def test_a_model_without_text_needs_a_first_frame(card: VideoCard) -> None:
    image_only = card.model_copy(update={"conditions": ["first_frame", "last_frame"], "layout": "wan-i2v"})
    for inputs in ({}, {"last_frame": "k"}):
        with pytest.raises(InvalidRequest, match="tiny-wan makes no clip from text alone") as refused:
            _validate(image_only, inputs=inputs)
        assert refused.value.param == "input_reference"
    assert _validate(image_only, inputs={"first_frame": "k"}).num_frames == 32


def test_given_frames_leave_something_to_make(card: VideoCard) -> None:
    both = card.model_copy(update={"conditions": ["text", "first_frame", "last_frame"]})
    inputs = {"first_frame": "k", "last_frame": "k"}
    # 5 frames are two latent frames, which both images fill; 6 are made as 9, three latent frames
    with pytest.raises(InvalidRequest) as refused:
        _validate(both, inputs=inputs, num_frames=5)
    assert (refused.value.param, refused.value.value) == ("num_frames", 5)
    assert _validate(both, inputs=inputs, num_frames=6).num_frames == 6
    # a chain ends in the last frame, behind the frame that its last segment takes over: 5 + 3 + 3 frames
    with pytest.raises(InvalidRequest, match="must leave something to make"):
        _validate(both, inputs=inputs, num_frames=11, extend={"segments": 3})
    # the layout that holds its last frame in the last place cannot be trimmed behind it
    channels = both.model_copy(update={"layout": "wan-i2v"})
    with pytest.raises(InvalidRequest, match="ends in a given frame; 33 frames can be made, got 32"):
        _validate(channels, inputs=inputs, num_frames=32)
    assert _validate(channels, inputs=inputs, num_frames=33).num_frames == 33


def test_two_experts_take_two_scales(card: VideoCard) -> None:
    defaults = card.defaults.model_copy(update={"guidance_scale_2": 3.0})
    two = card.model_copy(update={"defaults": defaults})
    assert _validate(two).guidance_scale_2 == 3.0
    assert _validate(two, guidance_scale_2=2).guidance_scale_2 == 2.0


def test_cost_follows_shape_and_steps(card: VideoCard) -> None:
    # 33 frames: 9 latent frames of 10 x 6 tokens; 8 steps
    one = estimate_cost(card, _validate(card, num_frames=32))
    assert one.seconds == pytest.approx(0.5 + 8 * 540 * 0.001 + 33 * 160 * 96 * 1e-7)
    assert one.peak_memory_bytes == 1000 + 540 * 10
    # two segments of 45 frames as generated: 12 latent frames each
    two = estimate_cost(card, _validate(card, num_frames=89))
    assert two.seconds == pytest.approx(0.5 + 2 * (8 * 720 * 0.001 + 45 * 160 * 96 * 1e-7))
    assert two.peak_memory_bytes == 1000 + 720 * 10
    # segments of 46 and 45 frames as generated, which are made as 49 and 45: the larger one sets the peak
    assert estimate_cost(card, _validate(card, num_frames=90)).peak_memory_bytes == 1000 + 13 * 60 * 10


def test_a_refused_value_is_not_repeated_at_length() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_clip_request({"prompt": "a", "seconds": "9" * 5000})
    assert len(refused.value.message) < 400
    with pytest.raises(InvalidRequest) as refused:
        validate_clip(_CARD, parse_clip_request({"prompt": "a \ud800"}))
    assert (refused.value.param, refused.value.value) == ("prompt", "U+D800 at 2")
    with pytest.raises(InvalidRequest) as refused:
        parse_clip_request({"prompt": "a", "size": ["\ud800"]})
    refused.value.message.encode()
    with pytest.raises(InvalidRequest, match=r"^prompt: is required\.$"):
        parse_clip_request({})
    assert ClipRequest(prompt="a").seed is None


_CARD = VideoCard.model_validate(
    {
        "name": "tiny-wan",
        "pool": "video",
        "revision": "1",
        "hash": "sha256:00",
        "license": "Apache-2.0",
        "origin": "drawn",
        "layout": "wan-ti2v",
        "size": {"default": "160x96", "multiple_of": 16, "min": [64, 64], "max": [256, 256], "max_pixels": 36864},
        "frames": {"rule": "4k+1", "min": 1, "max": 57, "default": 33, "temporal": 4},
        "fps": 16,
        "fps_range": [1, 60],
        "defaults": {"num_inference_steps": 8, "guidance_scale": 4.0, "seconds": 2},
        "limits": {"max_prompt_chars": 200, "max_steps": 50, "max_seconds": 60, "max_guidance_scale": 30},
        "conditions": ["text", "first_frame"],
    }
)


@pytest.mark.parametrize("seconds", [1e308, 1e300, 1e19])
@pytest.mark.parametrize("param", ["seconds", "extend.seconds"])
def test_a_length_past_every_number_of_frames_is_refused(card: VideoCard, param: str, seconds: float) -> None:
    values: dict[str, Any] = {"seconds": seconds} if param == "seconds" else {"extend": {"seconds": seconds}}
    with pytest.raises(InvalidRequest, match=r"at most 60 s, which is 960 frames at 16 fps") as caught:
        _validate(card, **values)
    assert caught.value.param == param
    assert caught.value.rule and caught.value.value
