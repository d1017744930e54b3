"""Errors of the video engine: one tree, mapped once where the GPU program answers.

`code` is the job error code that a caller sees; messages name the field, the rule and the value, never a path.
"""

from typing import ClassVar


class VideoError(Exception):
    """Anything that ends a clip; the subclasses say whose fault it is."""

    code: ClassVar[str] = "internal_error"


class InvalidClip(VideoError):
    """The request asks for something that this model or this release cannot do."""

    code = "invalid_request"


class InvalidOutput(VideoError):
    """What was made is not a clip that anybody may have: not finite, black, flat, or not as asked."""

    code = "invalid_output"


class CheckpointError(VideoError):
    """The model's folder is missing a file, holds a wrong one, or is of a layout that is not known."""

    code = "model_error"


class Cancelled(VideoError):
    """Somebody asked for the clip to stop; raised by a report callback, between two steps."""

    code = "cancelled"
