"""Takes the GPU program's place in a campaign: its protocol, its lock and its end, real files, and no model.

Loading the real one takes more of a busy machine than all that a campaign looks at; MEDIA_SERVER_TEST_GPU_PROGRAM
names this file. Its clips are grey, of the frames that were asked for; each step takes a few hundredths of a second.
"""

import argparse
import fcntl
import json
import os
import queue
import signal
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

STEP_S = 0.08
CARD: dict[str, Any] = {
    "v": 1,
    "kind": "video",
    "revision": "1",
    "hash": "sha256:0",
    "license": "Apache-2.0",
    "origin": "a stand-in",
    "layout": "wan-ti2v",
    "size": {"default": "64x64", "multiple_of": 16, "min": [64, 64], "max": [256, 256], "max_pixels": 65536},
    "frames": {"rule": "4k+1", "min": 1, "max": 57, "default": 17, "temporal": 4},
    "fps": 16,
    "fps_range": [1, 60],
    "defaults": {"num_inference_steps": 8, "guidance_scale": 3.0, "seconds": 1, "flow_shift": 3.0},
    "limits": {"max_prompt_chars": 2000, "max_steps": 400, "max_seconds": 60, "max_guidance_scale": 30},
    "conditions": ["text", "first_frame", "overlap"],
}
_REPORTED = ("model", "versions", "kernel_path", "seed", "segments", "drift", "file", "frames_sha256")

runs: "queue.Queue[dict[str, Any] | None]" = queue.Queue()
cancelled: set[tuple[str, int]] = set()


def main() -> None:
    """Serve until the parent stops or is gone."""
    parser = argparse.ArgumentParser()
    for name in ("--model-dir", "--device", "--threads", "--lock", "--name", "--pool", "--hash-cache"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_read, daemon=True).start()
    with open(arguments.lock, "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        send("ready", card={**CARD, "name": arguments.name, "pool": arguments.pool}, device="cpu")
        while (run := runs.get()) is not None:
            make(run)


def send(type: str, **members: Any) -> None:
    """Write one message."""
    print(json.dumps({"v": 1, "type": type, **members}), flush=True)


def make(run: dict[str, Any]) -> None:
    """Make one clip, as its prompt says: one that asks for a crash gets it at its first attempt."""
    about = {"job_id": run["job_id"], "attempt": run["attempt"]}
    request = run["request"]
    steps = request["num_inference_steps"]
    started = time.monotonic()
    for step in range(1, steps + 1):
        time.sleep(STEP_S)
        if (run["job_id"], run["attempt"]) in cancelled:
            send("cancelled", **about)
            return
        left_s = STEP_S * (steps - step)
        send(
            "progress", **about, stage="denoise", step=step, total_steps=steps, segment=0, segments=1,
            progress=95.0 * step / steps, eta_s=left_s,
        )  # fmt: skip
        if step > steps / 2 and "memory" in request["prompt"]:
            send("failed", **about, code="out_of_memory", message="The device has too little memory.")
            os._exit(5)
        if step > steps / 2 and "crash" in request["prompt"] and run["attempt"] == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
    path = Path(run["out_dir"]) / "video.mp4"
    write_clip(path, request["num_frames"], request["width"], request["height"], request["fps"])
    send(
        "done",
        **about,
        artifacts=[{"name": "video", "path": str(path), "content_type": "video/mp4"}],
        manifest={**dict.fromkeys(_REPORTED, "x"), "machine": {"name": "none"}},
        gpu_seconds=time.monotonic() - started,
        peak_memory_bytes=1 << 20,
    )


def write_clip(path: Path, num_frames: int, width: int, height: int, fps: float) -> None:
    """Write grey frames as H.264 in BT.709, as the real program's encoder does."""
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as file:
        stream = file.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        context = stream.codec_context
        context.color_primaries = context.color_trc = context.colorspace = context.color_range = 1
        for index in range(num_frames):
            pixels = np.full((height, width, 3), index * 8 % 256, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode(None))


def _read() -> None:
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if message["type"] == "run":
                runs.put(message)
            elif message["type"] == "cancel":
                cancelled.add((message["job_id"], message["attempt"]))
            elif message["type"] == "stop":
                runs.put(None)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
