"""Ports for services of the tests that must know theirs before they start."""

import socket


def free_port() -> int:
    """Find a port of loopback that nobody listens on now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
    return port
