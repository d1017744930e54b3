"""A caller that asks for clips over a bad line, and keeps book: what was accepted, how it went, how it ended.

Each request is sent until it is answered, under an Idempotency-Key, so what the book says was accepted is all there
should be. What is read is held against what was read before.
"""

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

TERMINAL = ("completed", "failed", "cancelled")
# how many of its jobs it lets wait at a time
MAX_OPEN = 4
# ends that a job may come to in a campaign, by what it is
_DAMAGE = {"worker_lost", "worker_crashed", "insufficient_storage", "internal_error"}


@dataclass
class Entry:
    """A job in the book."""

    key: str
    kind: str
    id: str = ""
    status: str = "queued"
    attempt: int = 0
    progress: int = 0
    error: str | None = None
    is_cancelled: bool = False
    is_deleted: bool = False
    seen: list[str] = field(default_factory=list)


class Customer:
    """Works in a thread until told to stop."""

    def __init__(self, hook_url: str, seed: int, *, with_films: bool, is_real: bool = False) -> None:
        # where it asks; set before the start
        self.url = ""
        self.hook_url = hook_url
        self.random = random.Random(seed)
        self.with_films = with_films
        # a real program takes no orders to fail
        self.orders = [] if is_real else ["crash", "memory", "burst"]
        self.book: list[Entry] = []
        self.findings: list[str] = []
        self.retries = 0
        self.is_closed = threading.Event()
        self.is_stopping = threading.Event()
        self._seed = seed
        self._thread: threading.Thread | None = None
        # nothing of HTTPS, whose certificates take longer to read than an answer; each request connects anew
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(trust_env=False, verify=False, limits=limits)

    def start(self) -> None:
        """Begin, or go on."""
        self.is_stopping.clear()
        self._thread = threading.Thread(target=self._run, daemon=True, name="customer")
        self._thread.start()

    def stop(self, limit_s: float) -> None:
        """Send nothing new; what was begun is finished."""
        assert self._thread is not None
        self.is_stopping.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self.findings.append(f"a request was not accepted within {limit_s:.0f} s after all had become calm")

    def open_entries(self) -> list[Entry]:
        """List what has not ended as far as is known."""
        return [entry for entry in self.book if entry.id and entry.status not in TERMINAL and not entry.is_deleted]

    def _run(self) -> None:
        while not self.is_stopping.is_set():
            if len(self.open_entries()) < MAX_OPEN:
                self._submit()
            self.poll()
            self._meddle()
            self.is_stopping.wait(0.2)

    def _submit(self) -> None:
        kinds = ["clip"] * 12 + ["long"] * 3 + ["image"] * 3 + self.orders
        kind = self.random.choice(kinds + (["film"] if self.with_films else []))
        entry = Entry(key=f"{self._seed}-{len(self.book)}", kind=kind)
        self.book.append(entry)
        body: dict[str, Any] = {"metadata": {"key": entry.key}, "webhook_url": self.hook_url}
        if kind == "film":
            path, body = "/v1/films", {**body, "idea": "a red ball", "seconds": 1, "shots": 2, "size": "64x64"}
        else:
            path = "/v1/videos"
            steps = 120 if kind == "long" else self.random.randint(3, 25)
            body |= {"prompt": f"a {kind}", "size": "64x64", "num_frames": 17, "num_inference_steps": steps}
            if kind == "image":
                body["input_reference"] = {"image_url": _IMAGE}
        answer = self._send("POST", path, body, {"idempotency-key": entry.key})
        if answer is not None:
            entry.id = answer["id"]

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any] | None:
        """Send until there is an answer that says something; None if the request is refused for good."""
        while True:
            try:
                answer = self._http.request(method, self.url + path, json=body, headers=headers, timeout=8.0)
                if answer.is_success:
                    found: dict[str, Any] = answer.json()
                    return found
                code = answer.json()["error"]["code"]
            except (httpx.HTTPError, ValueError, KeyError) as error:
                code = type(error).__name__
                answer = None
            if answer is not None and answer.status_code < 500 and answer.status_code not in (409, 429):
                if (method, answer.status_code) != ("DELETE", 404):
                    self.findings.append(f"{method} {path} was refused: {answer.status_code} {code}")
                return None
            if answer is not None and answer.status_code == 500:
                self.findings.append(f"{method} {path} was answered with 500")
            if self.is_closed.is_set():
                return None
            self.retries += 1
            time.sleep(0.3)

    def poll(self) -> None:
        """Ask for each job that has not ended, once; no answer is no news."""
        for entry in self.open_entries():
            try:
                answer = self._http.get(f"{self.url}/v1/jobs/{entry.id}", timeout=5.0)
                if answer.status_code == 404:
                    self.findings.append(f"{entry.id} was accepted, and is not there")
                    entry.is_deleted = True
                elif answer.status_code == 200:
                    self.note(entry, answer.json())
            except (httpx.HTTPError, ValueError):
                continue

    def note(self, entry: Entry, job: dict[str, Any]) -> None:
        """Hold what is read against what was read before."""
        if job["attempt"] < entry.attempt:
            self.findings.append(f"{entry.id} went back from attempt {entry.attempt} to {job['attempt']}")
        if job["attempt"] == entry.attempt and job["progress"] < entry.progress and entry.kind != "film":
            self.findings.append(f"{entry.id} went back from {entry.progress} % to {job['progress']} %")
        if entry.status in TERMINAL and job["status"] != entry.status:
            self.findings.append(f"{entry.id} had ended as {entry.status}, and is {job['status']}")
        entry.attempt, entry.progress, entry.status = job["attempt"], job["progress"], job["status"]
        entry.error = (job["error"] or {}).get("code")

    def judge(self, entry: Entry) -> str | None:
        """Say what is wrong with a job's end."""
        if entry.status == "cancelled":
            return None if entry.is_cancelled else f"{entry.id} was cancelled, and nobody asked for it"
        if entry.status == "failed":
            if entry.error in _DAMAGE or (entry.kind == "memory" and entry.error == "out_of_memory"):
                return None
            if entry.kind == "film" and entry.error in ("storyboard_failed", "shot_failed", "join_failed"):
                return None
            return f"{entry.id} ({entry.kind}) failed with {entry.error}"
        if entry.status == "completed" and entry.kind == "memory":
            return f"{entry.id} has completed, and cannot have"
        return None

    def _meddle(self) -> None:
        """Cancel and delete now and then, whatever state a job is in."""
        draw = self.random.random()
        known = [entry for entry in self.book if entry.id and not entry.is_deleted]
        if not known or draw > 0.08:
            return
        entry = self.random.choice(known[-6:])
        if draw < 0.04:
            entry.is_cancelled = True
            self._send("POST", f"/v1/jobs/{entry.id}/cancel")
        elif entry.kind != "film":
            entry.is_deleted = entry.is_cancelled = True
            self._send("DELETE", f"/v1/videos/{entry.id}")


# a red picture of 64x64
_IMAGE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAX0lEQVR4nO3PQQ0AIBDAMMC/50MEj4ZkVbDtWX87OuBVA1oDWgNa"
    "A1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA9oFUoUBf3Xr7AgAAAAASUVORK5C"
    "YII="
)
