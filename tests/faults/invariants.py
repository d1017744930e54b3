"""What must hold of a data folder once everything has ended, whatever died on the way: by database and files.

Each finding is a line of text; none means that all holds.
"""

import json
import re
import sqlite3
from collections import Counter
from pathlib import Path
from time import time

TERMINAL = ("completed", "failed", "cancelled")
_UNNAMED = re.compile(r"#\d+$")


def findings(data_dir: Path) -> list[str]:
    """Look at a data folder whose jobs have all ended and whose garbage has been collected."""
    with sqlite3.connect(f"file:{data_dir / 'media-server.db'}?mode=ro", uri=True) as conn:
        conn.row_factory = sqlite3.Row
        return [*_jobs(conn), *_progress(conn), *_messages(conn), *_files(conn, data_dir)]


def _jobs(conn: sqlite3.Connection) -> list[str]:
    """Each job ends once, by one event; what a job shows is of one attempt, and of none if it did not complete."""
    found = []
    events = conn.execute("SELECT job_id, type FROM events")
    ends = Counter(row["job_id"] for row in events if row["type"].partition(".")[2] in TERMINAL)
    for job in conn.execute("SELECT id, kind, status, winning_attempt, deleted_at FROM jobs"):
        if job["status"] not in TERMINAL:
            found.append(f"{job['id']} has not ended: {job['status']}")
        elif ends[job["id"]] != 1:
            found.append(f"{job['id']} has {ends[job['id']]} terminal events")
        query = "SELECT DISTINCT attempt FROM artifacts WHERE job_id = ?"
        attempts = [row["attempt"] for row in conn.execute(query, (job["id"],))]
        wanted = [job["winning_attempt"]] if job["status"] == "completed" and job["kind"] != "film" else []
        if attempts != wanted:
            found.append(f"{job['id']} ({job['status']}) shows files of attempts {attempts}, should be {wanted}")
        query = "SELECT count(*) FROM attempts WHERE job_id = ? AND outcome = 'running'"
        if job["status"] in TERMINAL and conn.execute(query, (job["id"],)).fetchone()[0]:
            found.append(f"{job['id']} has ended, and an attempt of it runs")
    return found


def _progress(conn: sqlite3.Connection) -> list[str]:
    """Progress never goes backwards within an attempt, and a later attempt follows an earlier one."""
    found = []
    last: dict[str, tuple[int, float]] = {}
    for event in conn.execute("SELECT job_id, attempt, type, data FROM events ORDER BY seq"):
        progress = json.loads(event["data"] or "{}").get("progress", 0.0) if event["type"] == "job.progress" else 0.0
        now = (event["attempt"], progress if event["type"] == "job.progress" else 0.0)
        before = last.get(event["job_id"], (0, 0.0))
        if now[0] < before[0] or (event["type"] == "job.progress" and now[0] == before[0] and now[1] < before[1]):
            found.append(f"{event['job_id']} went back from {before} to {now}")
        last[event["job_id"]] = max(now, before)
    return found


def _messages(conn: sqlite3.Connection) -> list[str]:
    """Each root job has one message for each receiver, and that has been delivered or given up."""
    found = []
    query = "SELECT job_id, endpoint_id, url, state FROM outbox"
    counts: Counter[tuple[str, str | None]] = Counter()
    for row in conn.execute(query):
        counts[row["job_id"], row["endpoint_id"]] += 1
        if row["state"] == "pending":
            found.append(f"a message of {row['job_id']} is pending")
    for (job_id, endpoint_id), count in counts.items():
        if count > 1:
            found.append(f"{job_id} has {count} messages for {endpoint_id or 'its own URL'}")
    return found


def _files(conn: sqlite3.Connection, data_dir: Path) -> list[str]:
    """Each file belongs to a job that is not deleted, as its result or its input; each result has its file."""
    owned: set[str] = set()
    query = "SELECT a.key FROM artifacts a JOIN jobs j ON j.id = a.job_id WHERE j.deleted_at IS NULL"
    results = {row["key"] for row in conn.execute(query)}
    for row in conn.execute("SELECT params FROM jobs WHERE deleted_at IS NULL"):
        owned |= set((json.loads(row["params"]).get("inputs") or {}).values())
    root = data_dir / "artifacts"
    there = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    found = [f"the file {key} is gone" for key in sorted(results | owned) if key not in there]
    garbage = {row["prefix"]: row["due_at"] for row in conn.execute("SELECT prefix, due_at FROM garbage")}
    known = {row["id"] for row in conn.execute("SELECT id FROM jobs")}
    # inputs of a request whose API died before the job was written: the sweeper has them in hand
    held = tuple(prefix for prefix, due_at in garbage.items() if prefix.split("/")[0] not in known and due_at > time())
    for key in sorted(there - results - owned):
        if held and key.startswith(held):
            continue
        if not key.startswith("models/") or _UNNAMED.search(key):
            found.append(f"the file {key} has no owner")
    work = data_dir / "work"
    found += [f"{path.relative_to(data_dir)} is left of a killed worker" for path in sorted(work.glob("*/*"))]
    found += [f"{prefix} was not collected" for prefix in garbage if prefix not in held]
    return found
