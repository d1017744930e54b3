"""Model cards of the tests: a small video model, one whose card says how captions are written, a language model."""

from media_server.models.card import TextCard, VideoCard

VIDEO_CARD = VideoCard.model_validate(
    {
        "name": "tiny-wan",
        "pool": "video",
        "revision": "test",
        "hash": "sha256:00",
        "license": "Apache-2.0",
        "origin": "drawn for the tests",
        "layout": "wan-ti2v",
        "size": {
            "default": "160x96",
            "multiple_of": 16,
            "min": [64, 64],
            "max": [256, 256],
            "max_pixels": 36864,
            "trained": ["160x96"],
        },
        "frames": {"rule": "4k+1", "min": 1, "max": 57, "default": 33, "temporal": 4},
        "fps": 16,
        "fps_range": [1, 60],
        "defaults": {"num_inference_steps": 8, "guidance_scale": 3.0, "seconds": 2},
        "limits": {"max_prompt_chars": 500, "max_steps": 50, "max_seconds": 30, "max_guidance_scale": 20},
        "conditions": ["text", "first_frame", "last_frame", "overlap"],
    }
)
TEXT_CARD = TextCard.model_validate(
    {
        "name": "smollm2-135m-instruct",
        "pool": "text",
        "revision": "test",
        "hash": "sha256:01",
        "license": "Apache-2.0",
        "origin": "none",
        "context_length": 8192,
        "tokenizer": "models/smollm2-135m-instruct/01/tokenizer.json",
        "eos_token_ids": [2],
    }
)
COLORS = ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "white", "black"]
SLOTS = {
    "size": ["small", "large"],
    "color": COLORS,
    "kind": ["ball", "square", "triangle", "star", "car", "boat", "tree", "house", "bird", "sun", "moon"],
    "motion": ["left", "right", "up", "down", "growing", "shrinking", "bouncing", "spinning", "still"],
    "backdrop": [*COLORS, "day", "night", "sea", "snow", "rain", "city", "nightfall"],
    "camera": ["none", "pan left", "pan right", "zoom in", "zoom out"],
    "relation": ["left of", "right of", "above", "below"],
}
CAPTIONED_CARD = VideoCard.model_validate(
    {
        "name": "tiny-wan", "pool": "video", "revision": "test", "hash": "sha256:00", "license": "Apache-2.0",
        "origin": "drawn for the tests", "layout": "wan-ti2v",
        "size": {
            "default": "160x96", "multiple_of": 16, "min": [64, 64], "max": [256, 256], "max_pixels": 36864,
            "trained": ["160x96"],
        },
        "frames": {"rule": "4k+1", "min": 1, "max": 57, "default": 33, "temporal": 4},
        "fps": 16, "fps_range": [1, 60],
        "defaults": {"num_inference_steps": 8, "guidance_scale": 3.0, "seconds": 2},
        "limits": {"max_prompt_chars": 500, "max_steps": 50, "max_seconds": 30, "max_guidance_scale": 20},
        "caption_style": {
            "text": "One short sentence in plain words.",
            "examples": ["a red ball bouncing on a blue background", "a small yellow bird moving left on a sunny day"],
            "slots": SLOTS,
        },
    }
)  # fmt: skip
