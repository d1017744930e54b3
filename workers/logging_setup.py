"""Logging of a worker process: the front's set-up, so that every process of the service writes the same lines."""

from media_server.logging_setup import setup_logging

__all__ = ["setup_logging"]
