"""Stands in for the GPU program: speaks its protocol, and does what a run's prompt says.

Started as a subprocess by tests/workers/test_video_worker.py. `runs.log` beside this run's lock file notes each run,
so that a test sees what reached the program.
"""

import base64
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LOG = Path(sys.argv[1])
CARD: dict[str, Any] = json.loads(Path(sys.argv[2]).read_text())


def send(type: str, **members: Any) -> None:
    print(json.dumps({"v": 1, "type": type, **members}), flush=True)


def progress(run: dict[str, Any], step: int, total: int, eta_s: float = 0.1) -> None:
    send(
        "progress",
        job_id=run["job_id"],
        attempt=run["attempt"],
        stage="denoise",
        step=step,
        total_steps=total,
        segment=0,
        segments=1,
        progress=100.0 * step / total,
        eta_s=eta_s,
    )


def preview(run: dict[str, Any], step: int, total: int) -> None:
    send(
        "preview",
        job_id=run["job_id"],
        attempt=run["attempt"],
        segment=0,
        step=step,
        total_steps=total,
        jpeg=base64.b64encode(b"picture %d" % step).decode(),
    )
    progress(run, step, total)


def drift(run: dict[str, Any]) -> None:
    finding = {"segment": 1, "drifted": ["luma"], "is_stopped": False}
    send("drift", job_id=run["job_id"], attempt=run["attempt"], finding=finding)


def wait_for_cancel(run: dict[str, Any], eta_s: float | None) -> None:
    if eta_s is not None:
        progress(run, 1, 4, eta_s)
    while (message := json.loads(sys.stdin.readline()))["type"] != "cancel":
        pass
    send("cancelled", job_id=message["job_id"], attempt=message["attempt"])


def checkpoint(run: dict[str, Any], segment: int) -> None:
    path = Path(run["out_dir"]) / f"segment_{segment}.mkv"
    path.write_bytes(b"segment %d" % segment)
    send(
        "checkpoint",
        job_id=run["job_id"],
        attempt=run["attempt"],
        segment=segment,
        path=str(path),
        data={"n": segment},
    )


def done(run: dict[str, Any]) -> None:
    for step in range(1, 5):
        progress(run, step, 4)
    path = Path(run["out_dir"]) / "video.mp4"
    path.write_bytes(b"a clip")
    manifest: dict[str, Any] = dict.fromkeys(
        ("model", "versions", "machine", "kernel_path", "seed", "segments", "drift", "file", "frames_sha256"), "x"
    )
    manifest["machine"] = {"name": "none"}
    send(
        "done",
        job_id=run["job_id"],
        attempt=run["attempt"],
        artifacts=[{"name": "video", "path": str(path), "content_type": "video/mp4"}],
        manifest=manifest,
        gpu_seconds=1.5,
        peak_memory_bytes=1000,
    )


def main() -> None:
    send("ready", card=CARD, device="cpu")
    while line := sys.stdin.readline():
        run = json.loads(line)
        if run["type"] == "stop":
            return
        if run["type"] != "run":
            continue
        with LOG.open("a") as file:
            file.write(json.dumps({**run, "pid": os.getpid()}) + "\n")
        behaviour = run["request"]["prompt"]
        if behaviour == "crash" or (behaviour == "crash once" and run["attempt"] == 1):
            progress(run, 1, 4)
            os._exit(9)
        elif behaviour == "out of memory":
            send("failed", job_id=run["job_id"], attempt=run["attempt"], code="out_of_memory", message="too large")
        elif behaviour == "hang":
            progress(run, 1, 4)
            time.sleep(600)
        elif behaviour in ("wait", "wait long") or (behaviour == "wait at first" and run["attempt"] == 1):
            wait_for_cancel(run, 0.1 if behaviour == "wait" else 600.0)
        elif behaviour == "wait in silence":
            wait_for_cancel(run, None)
        elif behaviour == "show, then wait":
            drift(run)
            preview(run, 1, 4)
            preview(run, 2, 4)
            wait_for_cancel(run, None)
        elif behaviour == "finish when told":
            progress(run, 1, 4)
            while not LOG.with_name("go").exists():
                time.sleep(0.02)
            done(run)
        elif behaviour == "segment, then wait":
            checkpoint(run, 0)
            wait_for_cancel(run, 0.1)
        elif behaviour == "segments, then crash" and run["attempt"] == 1:
            checkpoint(run, 0)
            checkpoint(run, 1)
            os._exit(9)
        else:
            done(run)


if __name__ == "__main__":
    main()
