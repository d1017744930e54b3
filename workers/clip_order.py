"""What the GPU program is told to make: a job's parameters and prompts, as it reads them."""

from typing import Any

from media_server.jobs.spec import Job
from media_server.models.card import VideoCard

_FIELDS = (
    "width",
    "height",
    "num_frames",
    "fps",
    "seed",
    "num_inference_steps",
    "guidance_scale",
    "guidance_scale_2",
    "flow_shift",
    "attention",
    "extend",
    "output",
)


class OrderError(Exception):
    """The job cannot be ordered; the message says why."""


def make_order(job: Job, card: VideoCard) -> dict[str, Any]:
    """Put a job's parameters and prompts together.

    Raises OrderError if the job is another model's, or if its prompt has been erased.
    """
    if job.model not in (None, card.name):
        raise OrderError(f"This pool serves {card.name}, not {job.model}.")
    if "prompt" not in job.prompts:
        raise OrderError("The clip's prompt has been erased.")
    order = {name: job.params.get(name) for name in _FIELDS}
    if order["extend"] is None and "video" in job.params.get("inputs", {}):
        has_overlap = "overlap" in card.conditions
        order["extend"] = {"overlap_frames": card.frames.temporal + 1 if has_overlap else 1}
    indices = sorted(int(name.partition(".")[2]) for name in job.prompts if name.startswith("segment."))
    return {
        **order,
        "prompt": job.prompts["prompt"],
        "negative_prompt": job.prompts.get("negative_prompt", ""),
        "segment_prompts": [job.prompts[f"segment.{index}"] for index in indices],
        "scheduler": job.params.get("scheduler") or card.defaults.scheduler,
    }


def predict_longest_s(job: Job, card: VideoCard) -> float:
    """Predict the longest piece of work between two reports: one step, or encoding the frames that are given."""
    params, cost = job.params, card.cost
    frames = card.frames.fit(min(int(params["num_frames"]), card.frames.max))
    pixels = int(params["width"]) * int(params["height"])
    tokens = ((frames - 1) // card.frames.temporal + 1) * pixels // card.size.multiple_of**2
    step_s, given_s = tokens * cost.seconds_per_step_token, frames * pixels * cost.seconds_per_frame_pixel
    return max(step_s, given_s if params.get("inputs") else 0.0, cost.seconds_fixed)
