"""`media-server up`: every process of the service on this machine, started, watched, restarted, drained.

Life: lock the data folder -> open the port -> migrate -> Valkey -> the rest -> say the address once ready -> watch.
On SIGTERM or Ctrl-C the children get SIGTERM, finish or release their jobs, and are killed after DRAIN_S; Valkey goes
last, since the others still ring through it. A second signal kills at once.

Invariants: the listening socket is the supervisor's, so an API that dies loses no connection that waits; a child that
died has its leases ended before it is started again; nothing of ours outlives the supervisor.
"""

import argparse
import errno
import http.client
import logging
import signal
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from sqlalchemy.exc import OperationalError

from media_server.artifacts.reserve import with_reserve
from media_server.errors import ConfigurationError
from media_server.jobs.claims import end_leases
from media_server.jobs.database import Database, lock_data_dir, migrate, open_database
from media_server.jobs.doorbell import make_celery, ring
from media_server.open_address import refuse_open_address
from media_server.settings import Settings, child_environment, load_settings
from workers.child import tie_to_parent
from workers.leases import end_leases_of_the_dead, withdraw_engine, worker_id
from workers.logging_setup import setup_logging
from workers.plan import VALKEY, plan_children
from workers.processes import Child, describe_exit, write_line
from workers.runtime_folder import remove_runtime_folder
from workers.valkey import wait_until_answering

logger = logging.getLogger(__name__)

# 30 s in all for the caller's SIGTERM; pool workers leave by themselves at 25 s
DRAIN_S = 26.0
VALKEY_START_S = 10.0
_TICK_S = 0.1
_READY_EVERY_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Start and watch the whole service on this machine."""
    arguments = _parse(argv)
    if arguments.parent is not None and not tie_to_parent(arguments.parent, signal.SIGTERM):
        return 1
    settings = load_settings(
        arguments.config,
        host=arguments.host,
        port=arguments.port,
        data_dir=arguments.data,
        log_level=arguments.log_level,
    )
    setup_logging(settings, "supervisor")
    with lock_data_dir(settings.data_dir), open_listener(settings.host, settings.port) as listener:
        settings = settings.model_copy(update={"port": listener.getsockname()[1]})
        try:
            db = open_database(settings.database, ring=partial(ring, make_celery(settings)))
            migrate(db)
            refuse_open_address(settings, db)
            supervisor = Supervisor(settings, db, listener)
            # SIGHUP: the terminal that it was started in is closed
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, supervisor.request_stop)
            return supervisor.run()
        finally:
            # after a refused start too: naming the broker has made it
            remove_runtime_folder(settings.runtime_path)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="media-server up", description=main.__doc__)
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for any free one (default 8000)")
    parser.add_argument("--data", metavar="DIR", help="data folder (default ~/.local/share/media-server)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    parser.add_argument("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    parser.add_argument("--parent", type=int, metavar="PID", help="stop when this parent process dies (on Linux)")
    return parser.parse_args(argv)


class Supervisor:
    """The children of one `up`, from the first start to the end of the drain."""

    def __init__(self, settings: Settings, db: Database, listener: socket.socket) -> None:
        self.settings = settings
        self.db = db
        self.listener = listener
        self.stop_requests = 0
        environment = child_environment(settings)
        write = partial(write_line, as_json=settings.log_json)
        self.children = [Child(spec, environment, write) for spec in plan_children(settings, listener.fileno())]

    def request_stop(self, signal_number: int, _frame: FrameType | None) -> None:
        """Note a signal; the loop acts on it."""
        self.stop_requests += 1

    def run(self) -> int:
        """Start the children, watch them until a stop is asked for, drain."""
        self._end_leases_of_the_dead()
        address = service_url(self.settings)
        try:
            if not self._start_all():
                return 1
            self._watch(address)
            return 0
        finally:
            self._drain()

    def _end_leases_of_the_dead(self) -> None:
        if self.settings.database_url is not None:
            return
        try:
            ended = with_reserve(self.settings, partial(end_leases_of_the_dead, self.db))
        except OperationalError:
            # they end by themselves; a service that does not start could free nothing
            logger.warning("the leases of a service that was killed here could not be ended", exc_info=True)
            return
        if ended:
            logger.info("%d jobs of a service that was killed here go on", ended)

    def _start_all(self) -> bool:
        for child in self.children:
            self._start(child)
            if child.spec.name == VALKEY and not self._wait_for_valkey():
                if self.stop_requests:
                    return True
                logger.error("The embedded Valkey does not answer after %.0f s; see its lines above", VALKEY_START_S)
                return False
        return True

    def _wait_for_valkey(self) -> bool:
        return wait_until_answering(self.settings.redis_url, VALKEY_START_S, lambda: not self.stop_requests)

    def _start(self, child: Child) -> None:
        if child.spec.name == VALKEY:
            # a killed server leaves its socket file behind
            self.settings.valkey_socket.unlink(missing_ok=True)
        logger.info("%s started (pid %d)", child.spec.name, child.start())

    def _start_again(self, child: Child) -> None:
        try:
            self._start(child)
        except OSError as error:
            # no memory, processes or files left: the others go on, and this one when there are some again
            wait_s = child.plan_restart()
            logger.error("%s cannot be started: %s; it is tried again in %.1f s", child.spec.name, error, wait_s)

    def _watch(self, address: str) -> None:
        """Restart what dies until a stop is asked for; say the address once the service is ready."""
        # an API that does not answer yet must not keep us from the others
        threading.Thread(target=_say_when_ready, args=(address, self.settings.data_dir), daemon=True).start()
        while not self.stop_requests:
            for child in self.children:
                self._care_for(child)
            time.sleep(_TICK_S)

    def _care_for(self, child: Child) -> None:
        if child.process is None:
            if time.monotonic() >= child.restart_at:
                self._start_again(child)
            return
        pid = child.process.pid
        exit_code = child.reap()
        if exit_code is None:
            return
        wait_s = child.plan_restart()
        logger.warning(
            "%s (pid %d) died: %s; it is started again in %.1f s",
            child.spec.name,
            pid,
            describe_exit(exit_code),
            wait_s,
        )
        self._end_leases(child, pid)
        if child.spec.is_engine:
            withdraw_engine(self.settings.redis_url, child.spec.name)

    def _end_leases(self, child: Child, pid: int) -> None:
        if not child.spec.has_leases:
            return
        try:
            ended = end_leases(self.db, worker_id(child.spec.name, pid))
        except Exception:
            # they end by themselves after lease_s
            logger.exception("The leases of %s could not be ended", child.spec.name)
            return
        if ended:
            logger.info("%s held %d jobs; they are free for another attempt", child.spec.name, ended)

    def _drain(self) -> None:
        """Stop every child: politely, then by force; Valkey last."""
        logger.info("stopping")
        # who connects from now on is refused, not left waiting
        self.listener.close()
        self._stop_children([child for child in self.children if child.spec.name != VALKEY], DRAIN_S)
        self._stop_children([child for child in self.children if child.spec.name == VALKEY], 2.0)
        if self.settings.broker_url is None:
            self.settings.valkey_socket.unlink(missing_ok=True)
        logger.info("stopped")

    def _stop_children(self, children: list[Child], grace_s: float) -> None:
        for child in children:
            child.terminate()
        deadline = time.monotonic() + grace_s
        requests = max(1, self.stop_requests)
        running = [child for child in children if child.process is not None]
        while running and time.monotonic() < deadline and self.stop_requests <= requests:
            running = [child for child in running if child.reap() is None]
            time.sleep(_TICK_S / 2)
        for child in running:
            assert child.process is not None
            pid = child.process.pid
            logger.warning("%s (pid %d) did not stop in time and is killed", child.spec.name, pid)
            child.kill()
            while child.reap() is None:
                time.sleep(_TICK_S / 10)
            self._end_leases(child, pid)


def open_listener(host: str, port: int) -> socket.socket:
    """Bind and listen; the API inherits the socket.

    Raises ConfigurationError if the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"The host {host!r} cannot be listened on: {error}", param="host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"Port {port} on {host} is in use by another program; choose another with --port."
            raise ConfigurationError(message, param="port", value=port) from error
        raise ConfigurationError(f"{host}:{port} cannot be listened on: {error.strerror}", param="host") from error
    return listener


def service_url(settings: Settings) -> str:
    """Give the address that a program on this machine reaches the service at."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _say_when_ready(address: str, data_dir: Path) -> None:
    while not _is_ready(urlsplit(address).netloc):
        time.sleep(_READY_EVERY_S)
    print(f"media-server is ready at {address} (data in {data_dir})", flush=True)


def _is_ready(netloc: str) -> bool:
    # plain: a client that knows HTTPS reads the certificates first, twice a second while the others start
    connection = http.client.HTTPConnection(netloc, timeout=5.0)
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()
