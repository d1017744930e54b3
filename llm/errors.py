"""The engine's own errors; the process that runs it maps them at its border."""


class EngineError(Exception):
    """Anything the engine refuses or cannot do."""


class RequestRefused(EngineError):
    """A request breaks a rule; `param` names the field, the message says rule and value."""

    def __init__(self, message: str, *, param: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class UnsupportedModel(EngineError):
    """A checkpoint or an architecture that this engine cannot run correctly."""


class CheckpointError(EngineError):
    """A model's files are missing, damaged or of an unknown kind."""


class IntegrityError(EngineError):
    """The engine's books do not balance: an invariant of ours is broken."""
