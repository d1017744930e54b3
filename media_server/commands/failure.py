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


class BrokenOff(CommandFailed):
    """The service answered, but the connection ended before all of the answer was here."""

    exit_code = EXIT_UNREACHABLE

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"the answer of {url} broke off before its end: {reason}")


class NotOurs(CommandFailed):
    """What answers at the address is no service of ours."""

    exit_code = EXIT_UNREACHABLE

    def __init__(self, url: str, got: str) -> None:
        super().__init__(f"what answers at {url} is no media-server: got {got}")


class Refused(CommandFailed):
    """The service answered with an error."""

    exit_code = EXIT_REFUSED

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status
        self.code = code
