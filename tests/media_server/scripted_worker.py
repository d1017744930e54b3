"""A worker that makes no clip and still does everything else that workers do: claim, beat, store, end."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from media_server.artifacts.store import ArtifactStore
from media_server.errors import JobError
from media_server.jobs import claims
from media_server.jobs.database import Database
from media_server.jobs.spec import Claim, Result


@dataclass
class ScriptedWorker:
    """Claims and ends jobs as the real workers do, with real files that cost nothing to make."""

    db: Database
    artifacts: ArtifactStore
    clip: bytes
    picture: bytes
    name: str = "scripted@test:1"
    beats: int = 3
    failures: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=lambda: {"drift": {"verdict": "none"}})

    def claim(self, pool: str) -> Claim | None:
        return claims.claim_next(self.db, pool, self.name, 20.0)

    def run_all(self) -> int:
        """Do everything that can be claimed; returns how many jobs that was."""
        done = 0
        while found := next((claim for pool in ("video", "text", "media") if (claim := self.claim(pool))), None):
            self.do(found)
            done += 1
        return done

    def do(self, claim: Claim) -> None:
        for step in range(1, self.beats + 1):
            beat = claims.beat(
                self.db, claim, lease_s=20.0, stage="denoise", step=step, total_steps=self.beats,
                progress=100.0 * step / (self.beats + 1), eta_s=1.0,
            )  # fmt: skip
            if beat.cancel_requested:
                assert claims.confirm_cancel(self.db, claim)
                return
        if self.failures:
            claims.fail(self.db, claim, JobError("out_of_memory", self.failures.pop()))
            return
        assert claims.complete(self.db, claim, self._make(claim))

    def _make(self, claim: Claim) -> Result:
        job = claim.job
        video, picture = ("video/mp4", self.clip), ("image/jpeg", self.picture)
        if job.kind == "storyboard":
            board = self._board(job.params)
            files = {"storyboard.json": ("application/json", json.dumps(board).encode())}
            return self._store(claim, files, {"storyboard": board})
        if job.kind == "join":
            files = {
                "film.mp4": video,
                "storyboard.json": ("application/json", json.dumps(job.params["storyboard"]).encode()),
                "timeline.otio": ("application/json", b"{}"),
                "contact_sheet.png": ("image/png", b"png"),
                "thumbnail.jpg": picture,
            }
            return self._store(claim, files, {})
        files = {
            "video.mp4": video,
            "thumbnail.jpg": picture,
            "spritesheet.jpg": picture,
            "spritesheet.vtt": ("text/vtt", b"WEBVTT\n\n00:00.000 --> 00:02.000\nspritesheet.jpg#xywh=0,0,16,9\n"),
            "last_frame.png": ("image/png", draw_picture("PNG", (160, 96))),
            "manifest.json": ("application/json", json.dumps({"v": 1, "seed": job.params["seed"]}).encode()),
        }
        return self._store(claim, files, self.report)

    def _store(self, claim: Claim, files: dict[str, tuple[str, bytes]], result: dict[str, Any]) -> Result:
        records = []
        for filename, (content_type, content) in files.items():
            stored = self.artifacts.put_bytes(f"{claim.job.id}/{claim.attempt}/{filename}", content, content_type)
            name = {"film.mp4": "video", "spritesheet.vtt": "spritesheet_vtt"}.get(filename, filename.partition(".")[0])
            records.append(stored.record(name))
        return Result(artifacts=records, result=result, gpu_seconds=0.5, peak_memory_bytes=1 << 20)

    @staticmethod
    def _board(params: dict[str, Any]) -> dict[str, Any]:
        count, total = params["shots"] or 2, params["num_frames"]
        lengths = [total // count + (index < total % count) for index in range(count)]
        shots = [
            {"index": index, "prompt": f"a red ball, shot {index}", "num_frames": length}
            for index, length in enumerate(lengths)
        ]
        return {"v": 1, "title": "A ball", "shots": shots}


def write_clip(path: Path, num_frames: int, size: tuple[int, int] = (160, 96), fps: int = 16) -> bytes:
    """Write a real clip of grey frames."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for index in range(num_frames):
            pixels = np.full((size[1], size[0], 3), (index * 8) % 256, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return path.read_bytes()


def draw_picture(format: str, size: tuple[int, int], color: str = "red") -> bytes:
    """Encode a picture of one colour."""
    content = io.BytesIO()
    Image.new("RGB", size, color).save(content, format)
    return content.getvalue()
