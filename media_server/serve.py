"""The API process: uvicorn around the application, on a socket of its own or on one that the supervisor opened."""

import argparse
import socket
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from media_server.app import create_app
from media_server.auth import refuse_open_address
from media_server.jobs.database import migrate, open_database
from media_server.logging_setup import setup_logging
from media_server.settings import load_settings

# streams are cut after this; their listeners come back with Last-Event-ID
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
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            backlog=_BACKLOG,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    server.run(None if arguments.fd is None else [socket.socket(fileno=arguments.fd)])
    return 0 if server.started else 1
