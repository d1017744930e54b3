"""What the GPU program says of a clip on its way, kept until the next beat tells it."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from media_server.jobs.spec import Preview


@dataclass(frozen=True)
class Progress:
    """The program's last word on its progress."""

    stage: str
    step: int
    total_steps: int
    progress: float
    eta_s: float
    segment: int
    segments: int


class News:
    """Progress and pictures of one run; what comes before a beat takes the place of what came earlier."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        # something was said since the last beat
        self.is_fresh = False
        self._preview: Preview | None = None
        self._num_previews = 0

    def take(self, message: Mapping[str, Any]) -> Progress:
        """Take a message of progress."""
        self.progress = Progress(**{name: message[name] for name in Progress.__annotations__})
        self.is_fresh = True
        return self.progress

    def take_preview(self, message: Mapping[str, Any]) -> None:
        """Take a picture."""
        self._num_previews += 1
        data = {name: message[name] for name in ("segment", "step", "total_steps")}
        self._preview = Preview(self._num_previews, data, base64.b64decode(message["jpeg"]))

    def beat(self) -> dict[str, Any]:
        """Give the arguments of a beat that tells what is fresh; none if nothing is. A picture is told once."""
        said = self.progress
        if said is None or not self.is_fresh:
            return {}
        preview, self._preview = self._preview, None
        return {
            "stage": said.stage,
            "step": said.step,
            "total_steps": said.total_steps,
            # the last percent is the upload's and the database's
            "progress": min(said.progress, 99.0),
            "eta_s": round(said.eta_s, 1),
            "data": {"segment": said.segment, "segments": said.segments} if said.segments > 1 else None,
            "preview": preview,
        }
