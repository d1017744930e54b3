"""How a command ends that cannot do what was asked: one line, and an exit code that a script can tell apart."""

EXIT_FAILED = 1
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_INTERRUPTED = 130


class CommandFailed(Exception):
    """The command ends here; the message is shown as one line."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Unreachable(CommandFailed):
    """No service answers at the address."""

    exit_code = EXIT_UNREACHABLE

    def __init__(self, url: str) -> None:
        super().__init__(f"no service answers at {url}; start one with `media-server up`")


class BrokenOff(Unreachable):
    """The service went away in the middle of an answer."""

    def __init__(self, url: str) -> None:
        CommandFailed.__init__(self, f"the service at {url} went away in the middle of its answer")


class Refused(CommandFailed):
    """The service answered with an error."""

    exit_code = EXIT_REFUSED

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status
        self.code = code
