"""A webhook receiver that fails at random and whose clock jumps; its log says what came, and whether it was taken."""

import json
import random
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks.webhooks import Webhook, WebhookVerificationError


@dataclass(frozen=True)
class Arrival:
    """One POST: the receiver's path, the message's id and event, and the status that it was answered."""

    path: str
    id: str
    type: str
    job_id: str
    body: bytes
    status: int


class Receiver:
    """Receives at /own (a request's own URL) and /endpoint (a managed one)."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.log: list[Arrival] = []
        self.secrets: dict[str, str] = {}
        # seconds that its clock is off; beyond 300 it refuses every signature
        self.skew_s = 0.0
        self.is_calm = False
        self.forged = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.receive(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def receive(self, handler: BaseHTTPRequestHandler) -> None:
        """Verify by this receiver's clock, note the arrival, and answer; or fail on purpose."""
        body = handler.rfile.read(int(handler.headers["content-length"]))
        with self.lock:
            draw = 1.0 if self.is_calm else self.random.random()
        if draw < 0.05:
            # the message is read and the answer never comes
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if draw < 0.1:
            time.sleep(1.5)
        status = 500 if draw < 0.25 else self._verify(handler, body)
        event: dict[str, Any] = json.loads(body)
        arrival = Arrival(handler.path, handler.headers["webhook-id"], event["type"], event["data"]["id"], body, status)
        # noted before it is answered: an answer that is lost has been noted all the same
        with self.lock:
            self.log.append(arrival)
        handler.send_response(status)
        handler.end_headers()

    def _verify(self, handler: BaseHTTPRequestHandler, body: bytes) -> int:
        secret = self.secrets.get(handler.path)
        if secret is None:
            return 204
        with self.lock:
            skew_s = self.skew_s
        headers = {name.lower(): value for name, value in handler.headers.items()}
        try:
            Webhook(secret).verify(body, {**headers, "webhook-timestamp": headers["webhook-timestamp"]})
        except WebhookVerificationError:
            self.forged += 1
            return 401
        # its own clock says whether that is too old or too new, as the library's tolerance does
        return 204 if abs(skew_s) <= 300 else 400

    def findings(self, ends: dict[str, str]) -> list[str]:
        """Say what is wrong: `ends` are the events that each job must have been announced with, once a receiver."""
        found = [f"{self.forged} signatures did not verify"] if self.forged else []
        ids: dict[tuple[str, str], set[str]] = {}
        bodies: dict[str, set[bytes]] = {}
        with self.lock:
            log = list(self.log)
        for arrival in log:
            ids.setdefault((arrival.path, arrival.job_id), set()).add(arrival.id)
            bodies.setdefault(arrival.id, set()).add(arrival.body)
            if arrival.job_id in ends and arrival.type != ends[arrival.job_id]:
                found.append(f"{arrival.job_id} was announced as {arrival.type}, it is {ends[arrival.job_id]}")
        found += [
            f"{job} was announced to {path} {len(same)} times" for (path, job), same in ids.items() if len(same) > 1
        ]
        found += [f"{id} came with {len(same)} bodies" for id, same in bodies.items() if len(same) > 1]
        taken = {(arrival.path, arrival.job_id) for arrival in log if 200 <= arrival.status < 300}
        found += [
            f"{job} was not taken by {path}"
            for job in ends
            for path in ("/own", "/endpoint")
            if (path, job) not in taken
        ]
        return found

    def close(self) -> None:
        """Stop receiving."""
        self.server.shutdown()
        self.server.server_close()
