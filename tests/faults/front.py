"""The API of a campaign's service, asked directly and not over the bad line."""

import contextlib
from typing import Any

import httpx

from tests.faults.customer import TERMINAL


class Front:
    """Asks in the service's own words; no answer is None, not an error."""

    def __init__(self, port: int) -> None:
        # nothing of HTTPS: reading the certificates takes longer than an answer. A connection for each request
        limits = httpx.Limits(max_keepalive_connections=0)
        url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=url, timeout=15, trust_env=False, verify=False, limits=limits)

    def get(self, path: str) -> dict[str, Any] | None:
        """Give the answer; None unless it is one with 200."""
        try:
            answer = self.http.get(path)
            return answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    def delete_clip(self, clip_id: str) -> int | None:
        """Delete a clip; gives the status, None if there was no answer."""
        try:
            return self.http.delete(f"/v1/videos/{clip_id}", timeout=20).status_code
        except httpx.HTTPError:
            return None

    def roots(self) -> list[dict[str, Any]]:
        """List the jobs that were asked for; one of an unknown state if the list cannot be had."""
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            page = self.get(f"/v1/jobs?kind=video&kind=film&limit=100{after}")
            if page is None:
                return [{"id": "", "status": "unknown", "metadata": {}}]
            found += [job for job in page["data"] if job["parent_id"] is None]
            if not page["has_more"]:
                return found
            after = f"&after={page['last_id']}"

    def has_content(self, path: str) -> bool:
        """Whether there is an MP4."""
        try:
            answer = self.http.get(path, timeout=30)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200 and answer.content[4:8] == b"ftyp"

    def are_delivered(self) -> bool:
        """Whether no message waits; those that wait for their next try are sent now, as their owner may."""
        waiting = (self.get("/v1/webhook_deliveries?status=pending&limit=100") or {"data": [None]})["data"]
        for delivery in waiting:
            if delivery is not None:
                with contextlib.suppress(httpx.HTTPError):
                    self.http.post(f"/v1/webhook_deliveries/{delivery['id']}/replay")
        return not waiting

    def add_endpoint(self, url: str) -> str:
        """Register a receiver for every end of clips and films; gives its secret."""
        types = [f"{kind}.{status}" for kind in ("video", "film") for status in TERMINAL]
        body = {"name": "campaign", "url": url, "event_types": types}
        return str(self.http.post("/v1/webhook_endpoints", json=body, timeout=30).json()["signing_secret"])
