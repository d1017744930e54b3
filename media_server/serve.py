"""The API process: uvicorn around the application, on a socket of its own or on one that the supervisor opened."""

import argparse
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from media_server.app import begin_stop, create_app
from media_server.jobs.database import migrate, open_database
from media_server.logging_setup import setup_logging
from media_server.open_address import refuse_open_address
from media_server.settings import load_settings

# at a stop streams end by themselves, and their listeners come back with Last-Event-ID; what has not ended is cut
GRACE_S = 5
_BACKLOG = 2048


def main(argv: Sequence[str]) -> int:
    """Run the API alone; database, broker and workers are elsewhere."""
    parser = argparse.ArgumentParser(prog="media-server api", description=main.__doc__)
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8000)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    parser.add_argument("--fd", type=int, help="a listening socket that the parent process hands over")
    arguments = parser.parse_args(argv)
    settings = load_settings(arguments.config, host=arguments.host, port=arguments.port)
    setup_logging(settings, "api")
    if arguments.fd is None:
        # the supervisor has done this; alone it is ours
        db = open_database(settings.database)
        migrate(db)
        refuse_open_address(settings, db)
        db.close()
    server = ApiServer(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        backlog=_BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    server.run(None if arguments.fd is None else [socket.socket(fileno=arguments.fd)])
    return 0 if server.started else 1


class ApiServer(uvicorn.Server):
    """uvicorn, except that the application hears of a stop before its requests are waited for."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        super().__init__(uvicorn.Config(app, **options))
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what waits, then stop as uvicorn does."""
        begin_stop(self._app)
        await super().shutdown(sockets)
