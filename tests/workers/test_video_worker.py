"""The video worker against a program that misbehaves on demand; database and files are real."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from media_server.artifacts.store import StoredFile, open_artifacts
from media_server.errors import ConfigurationError, JobError
from media_server.jobs import claims, previews, store
from media_server.jobs.doorbell import make_celery
from media_server.jobs.events import read_after
from media_server.jobs.spec import Beat, Claim, Job, JobSpec, Preview
from media_server.jobs.states import Status
from media_server.models.registry import get_card
from media_server.settings import ModelEntry, Settings
from tests.fresh_database import open_migrated
from workers import video_run, video_worker
from workers.clip_files import ClipFiles
from workers.gpu_process import ProgramFailed
from workers.leases import is_alive
from workers.pool_worker import PoolContext
from workers.video_worker import VideoWorker, find_entry

FAKE = Path(__file__).with_name("fake_gpu_program.py")
CARD: dict[str, Any] = {
    "v": 1,
    "name": "fake-wan",
    "kind": "video",
    "pool": "video",
    "revision": "1",
    "hash": "sha256:0",
    "license": "none",
    "origin": "a test",
    "layout": "wan-ti2v",
    "size": {"default": "64x64", "multiple_of": 16, "min": [64, 64], "max": [256, 256], "max_pixels": 65536},
    "frames": {"rule": "4k+1", "min": 1, "max": 57, "default": 33, "temporal": 4},
    "fps": 16,
    "fps_range": [1, 60],
    "defaults": {"num_inference_steps": 4, "guidance_scale": 3.0, "seconds": 2, "flow_shift": 3.0},
    "limits": {"max_prompt_chars": 100, "max_steps": 10, "max_seconds": 60, "max_guidance_scale": 30},
    "conditions": ["text", "first_frame", "overlap"],
}
PARAMS: dict[str, Any] = {
    "width": 64,
    "height": 64,
    "num_frames": 9,
    "fps": 16,
    "seed": 1,
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
    "guidance_scale_2": None,
    "flow_shift": 3.0,
    "attention": {"mode": "dense"},
    "extend": None,
    "output": {},
    "inputs": {},
}


class House:
    """A worker with its program, its database and its files."""

    def __init__(self, folder: Path, command: list[str] | None = None) -> None:
        self.settings = Settings(data_dir=folder, lease_s=20.0, beat_s=0.5, cancel_grace_s=3.0)
        self.db = open_migrated(self.settings.database)
        self.context = PoolContext(
            settings=self.settings,
            db=self.db,
            artifacts=open_artifacts(self.settings),
            celery=make_celery(self.settings),
            stopping=threading.Event(),
            pool="video",
            worker="video-0@test:1",
        )
        (folder / "card.json").write_text(json.dumps(CARD))
        self.log = folder / "runs.log"
        command = command or [sys.executable, str(FAKE), str(self.log), str(folder / "card.json")]
        self.worker = VideoWorker(self.settings, "video-0", command)
        self.worker.start(self.context)

    def submit(self, prompt: str, model: str = "fake-wan", **params: Any) -> str:
        spec = JobSpec(
            kind="video",
            pool="video",
            model=model,
            params={**PARAMS, **params},
            prompts={"prompt": prompt},
            max_attempts=2,
        )
        return store.submit(self.db, spec).id

    def claim(self) -> Claim:
        claim = claims.claim_next(self.db, "video", self.context.worker, self.settings.lease_s)
        assert claim is not None
        return claim

    def work(self) -> Claim:
        """Do the next job, as the pool worker would."""
        claim = self.claim()
        self.worker.handle(self.context, claim)
        return claim

    def job(self, job_id: str) -> Job:
        return store.get(self.db, job_id)

    def runs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def keys(self, job_id: str) -> list[str]:
        return sorted(self.context.artifacts.list_keys(job_id))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.worker.stop(house.context)
    house.db.close()


def meanwhile(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_until(is_so: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def test_a_clip_is_published_in_one_transaction(house: House) -> None:
    assert get_card(house.db, None, "video").name == "fake-wan"
    job_id = house.submit("finish")
    house.work()
    job = house.job(job_id)
    assert job.status is Status.COMPLETED
    assert (job.gpu_seconds, job.peak_memory_bytes, job.winning_attempt) == (1.5, 1000, 1)
    (record,) = store.artifacts_of(house.db, job_id)
    assert (record.name, record.key) == ("video", f"{job_id}/1/video.mp4")
    assert b"".join(house.context.artifacts.read(record.key)) == b"a clip"
    assert job.result is not None and set(job.result) >= {"drift", "kernel_path", "frames_sha256"}
    (run,) = house.runs()
    assert run["request"]["prompt"] == "finish" and run["request"]["num_frames"] == 9
    assert run["request"]["scheduler"] == "unipc"
    assert list(house.worker.work_dir.iterdir()) == []


def test_a_crash_costs_an_attempt_and_the_next_one_runs_in_a_new_program(house: House) -> None:
    job_id = house.submit("crash once")
    house.work()
    job = house.job(job_id)
    assert (job.status, job.attempt) == (Status.QUEUED, 1)
    assert job.gpu_seconds is not None and job.gpu_seconds > 0
    spent_s = job.gpu_seconds
    house.work()
    assert house.job(job_id).status is Status.COMPLETED
    # what the first attempt took, and what the program says of the second
    assert house.job(job_id).gpu_seconds == pytest.approx(spent_s + 1.5)
    first, second = house.runs()
    assert first["pid"] != second["pid"]
    assert house.keys(job_id) == [f"{job_id}/2/video.mp4"]


def test_a_crash_at_each_attempt_fails_the_job_by_name(house: House) -> None:
    job_id, next_id = house.submit("crash"), house.submit("finish")
    # the queue may give the second one between the two attempts
    for _ in range(3):
        house.work()
    job = house.job(job_id)
    assert (job.status, job.error_code) == (Status.FAILED, "worker_crashed")
    assert job.error_message is not None and "exit code 9" in job.error_message
    assert house.job(next_id).status is Status.COMPLETED


def test_out_of_memory_fails_one_job_and_not_the_next(house: House) -> None:
    job_id, next_id = house.submit("out of memory"), house.submit("finish")
    house.work()
    house.work()
    job = house.job(job_id)
    assert (job.status, job.error_code, job.attempt) == (Status.FAILED, "out_of_memory", 1)
    assert job.gpu_seconds is not None and job.gpu_seconds > 0
    assert house.job(next_id).status is Status.COMPLETED
    # in a new process: what is left of the old one's memory may be in pieces
    assert len({run["pid"] for run in house.runs()}) == 2


def test_a_cancel_is_confirmed_when_the_program_has_stopped(house: House) -> None:
    job_id = house.submit("wait")
    working = meanwhile(lambda: void(house.work()))
    wait_until(lambda: house.job(job_id).progress > 0)
    store.request_cancel(house.db, job_id)
    working.join(30)
    job = house.job(job_id)
    assert job.status is Status.CANCELLED
    assert job.gpu_seconds is not None and 0 < job.gpu_seconds < 30
    assert house.keys(job_id) == []
    # the same program goes on
    next_id = house.submit("finish")
    house.work()
    assert house.job(next_id).status is Status.COMPLETED
    assert len({run["pid"] for run in house.runs()}) == 1


def test_a_cancel_that_is_not_heard_ends_in_a_kill(house: House) -> None:
    job_id = house.submit("hang")
    working = meanwhile(lambda: void(house.work()))
    wait_until(lambda: house.job(job_id).progress > 0)
    asked_at = time.monotonic()
    store.request_cancel(house.db, job_id)
    working.join(30)
    assert house.job(job_id).status is Status.CANCELLED
    assert time.monotonic() - asked_at < 20
    next_id = house.submit("finish")
    house.work()
    assert house.job(next_id).status is Status.COMPLETED


def test_a_hung_program_is_killed_and_the_job_tried_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_run, "HUNG_S", 1.0)
    job_id = house.submit("hang")
    house.work()
    job = house.job(job_id)
    assert (job.status, job.attempt) == (Status.QUEUED, 1)
    house.work()
    job = house.job(job_id)
    assert (job.status, job.error_code) == (Status.FAILED, "worker_crashed")
    assert job.error_message is not None and "no progress for 1 s" in job.error_message


def test_a_lost_lease_stops_the_work_and_removes_its_files_only(house: House) -> None:
    job_id = house.submit("wait")
    working = meanwhile(lambda: void(house.work()))
    wait_until(lambda: house.job(job_id).progress > 0)
    house.context.artifacts.put_bytes(f"{job_id}/1/half.bin", b"x", "application/octet-stream")
    house.context.artifacts.put_bytes(f"{job_id}/segments/1_000.mkv", b"x", "video/x-matroska")
    claims.end_leases(house.db, house.context.worker)
    other = claims.claim_next(house.db, "video", "another@test:2", 20.0)
    assert other is not None and other.attempt == 2
    working.join(30)
    assert not working.is_alive()
    assert house.keys(job_id) == [f"{job_id}/segments/1_000.mkv"]
    assert house.job(job_id).lease_owner == "another@test:2"
    # the program was told to stop, and is free
    next_id = house.submit("finish")
    house.work()
    assert house.job(next_id).status is Status.COMPLETED


@pytest.mark.parametrize("prompt", ["wait", "hang"])
def test_an_error_that_nobody_foresaw_leaves_no_run_behind(
    house: House, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    beat = claims.beat

    def broken(*args: Any, progress: float | None = None, **members: Any) -> Beat:
        if progress is not None:
            raise KeyError("not foreseen")
        return beat(*args, progress=progress, **members)

    monkeypatch.setattr(claims, "beat", broken)
    house.submit(prompt)
    claim = house.claim()
    with pytest.raises(KeyError, match="not foreseen"):
        house.worker.handle(house.context, claim)
    claims.fail(house.db, claim, JobError("internal_error", "not foreseen"))
    monkeypatch.setattr(claims, "beat", beat)
    next_id = house.submit("finish")
    house.work()
    job = house.job(next_id)
    assert (job.status, job.attempt) == (Status.COMPLETED, 1)
    # who hears the cancel goes on, who does not is replaced
    assert len({run["pid"] for run in house.runs()}) == (1 if prompt == "wait" else 2)


def test_a_lost_claim_of_a_clip_that_is_made_costs_no_program(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "complete", lambda *_: False)
    job_id = house.submit("finish")
    started = time.monotonic()
    house.work()
    assert time.monotonic() - started < house.settings.cancel_grace_s
    assert house.keys(job_id) == []
    program, _ = house.worker.ensure_program(house.context)
    assert program.pid == house.runs()[0]["pid"]


def no_answer(*_: object, **__: object) -> bool:
    raise OperationalError("UPDATE jobs", {}, Exception("the database does not answer"))


def test_a_clip_that_is_made_waits_for_its_database(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_run, "COMPLETE_AGAIN_S", 0.01)
    complete = claims.complete
    answers = iter([no_answer, no_answer, complete])
    monkeypatch.setattr(claims, "complete", lambda *given: next(answers)(*given))
    job_id = house.submit("finish")
    house.work()
    job = house.job(job_id)
    assert (job.status, job.attempt) == (Status.COMPLETED, 1)
    assert len(house.keys(job_id)) > 0 and len(house.runs()) == 1


@pytest.mark.parametrize("num_lost", [1, 2])
def test_an_end_whose_answer_is_lost_keeps_its_files(
    house: House, monkeypatch: pytest.MonkeyPatch, num_lost: int
) -> None:
    """The database has committed, and its connection breaks before it says so; what is asked then may break too."""
    monkeypatch.setattr(video_run, "COMPLETE_AGAIN_S", 0.01)
    complete, lost = claims.complete, iter(range(num_lost))

    def commit_and_break(*given: Any) -> bool:
        done = complete(*given)
        return done if next(lost, None) is None else no_answer()

    monkeypatch.setattr(claims, "complete", commit_and_break)
    job_id = house.submit("finish")
    house.work()
    job = house.job(job_id)
    assert (job.status, job.winning_attempt) == (Status.COMPLETED, 1)
    names = {record.key for record in store.artifacts_of(house.db, job_id)}
    assert names and names <= set(house.keys(job_id))


def test_a_clip_that_is_made_waits_no_longer_than_its_lease(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_run, "COMPLETE_AGAIN_S", 0.01)
    tries: list[float] = []

    def refuse(*_: object) -> bool:
        # as if the last beat were a lease ago
        tries.append(time.monotonic())
        monkeypatch.setattr(time, "monotonic", lambda: tries[0] + house.settings.lease_s + 1.0)
        return no_answer()

    monkeypatch.setattr(claims, "complete", refuse)
    house.submit("finish")
    claim = house.claim()
    with pytest.raises(OperationalError):
        house.worker.handle(house.context, claim)
    assert len(tries) == 1


def slow_uploads(house: House, monkeypatch: pytest.MonkeyPatch, delay_s: float) -> threading.Event:
    """Have each upload take a while; the event is set as the first begins."""
    put_file, has_begun = house.context.artifacts.put_file, threading.Event()

    def put_slowly(key: str, source: Path, content_type: str) -> StoredFile:
        has_begun.set()
        time.sleep(delay_s)
        return put_file(key, source, content_type)

    monkeypatch.setattr(house.context.artifacts, "put_file", put_slowly)
    return has_begun


def test_finished_segments_are_handed_to_the_next_attempt(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    # the program dies long before they are uploaded
    slow_uploads(house, monkeypatch, 0.4)
    job_id = house.submit("segments, then crash")
    house.work()
    assert house.job(job_id).status is Status.QUEUED
    assert house.keys(job_id) == [f"{job_id}/segments/1_000.mkv", f"{job_id}/segments/1_001.mkv"]
    # an attempt that cannot find a segment begins where the row ends
    house.work()
    _, second = house.runs()
    assert [entry["segment"] for entry in second["resume"]] == [0, 1]
    assert [entry["data"] for entry in second["resume"]] == [{"n": 0}, {"n": 1}]
    assert Path(second["resume"][0]["path"]).name == "1_000.mkv"
    assert house.job(job_id).status is Status.COMPLETED
    assert house.keys(job_id) == [f"{job_id}/2/video.mp4"]


@pytest.mark.parametrize("prompt", ["segment, then wait", "finish"])
def test_a_cancel_during_an_upload_leaves_no_file(house: House, monkeypatch: pytest.MonkeyPatch, prompt: str) -> None:
    has_begun = slow_uploads(house, monkeypatch, 2.0)
    job_id = house.submit(prompt)
    working = meanwhile(lambda: void(house.work()))
    assert has_begun.wait(30)
    store.request_cancel(house.db, job_id)
    working.join(30)
    assert house.job(job_id).status is Status.CANCELLED
    assert house.keys(job_id) == []


def test_a_segment_that_comes_too_late_for_its_attempt_goes_again(house: House, tmp_path: Path) -> None:
    job_id = house.submit("finish")
    files = ClipFiles(house.context, house.claim(), tmp_path)
    (tmp_path / "segment.mkv").write_bytes(b"a segment")
    claims.end_leases(house.db, house.context.worker)
    assert claims.claim_next(house.db, "video", "another@test:2", 20.0) is not None
    files.keep_segment(0, tmp_path / "segment.mkv", {})
    assert (house.keys(job_id), claims.checkpoints(house.db, job_id)) == ([], [])


def test_pictures_and_findings_are_shown_while_a_clip_is_made(house: House) -> None:
    job_id = house.submit("show, then wait")
    working = meanwhile(lambda: void(house.work()))
    wait_until(lambda: (found := previews.find(house.db, job_id)) is not None and found[1].number == 2)
    found = previews.find(house.db, job_id)
    assert found == (1, Preview(2, {"segment": 0, "step": 2, "total_steps": 4}, b"picture 2"))
    told = read_after(house.db, job_id=job_id)
    assert [event.data for event in told if event.type == "job.drift"] == [
        {"segment": 1, "drifted": ["luma"], "is_stopped": False}
    ]
    # a row names its picture and does not hold it
    assert [event.data["preview"] for event in told if "preview" in event.data][-1] == 2
    assert max(len(json.dumps(event.data)) for event in told) < 300
    store.request_cancel(house.db, job_id)
    working.join(30)
    assert house.job(job_id).status is Status.CANCELLED
    assert previews.find(house.db, job_id) is None


def test_drain_gives_back_what_takes_too_long(house: House) -> None:
    job_id = house.submit("wait long")
    working = meanwhile(lambda: void(house.work()))
    wait_until(lambda: house.job(job_id).progress > 0)
    house.context.stopping.set()
    working.join(30)
    job = house.job(job_id)
    assert (job.status, job.uncounted) == (Status.QUEUED, 1)
    assert job.gpu_seconds is not None and job.gpu_seconds > 0


def test_drain_gives_back_what_has_not_begun(house: House) -> None:
    job_id = house.submit("wait in silence")
    working = meanwhile(lambda: void(house.work()))
    wait_until(house.log.exists)
    house.context.stopping.set()
    working.join(30)
    job = house.job(job_id)
    assert (job.status, job.uncounted) == (Status.QUEUED, 1)


def test_drain_finishes_what_is_soon_done(house: House) -> None:
    job_id = house.submit("finish when told")
    working = meanwhile(lambda: void(house.work()))
    wait_until(lambda: house.job(job_id).progress > 0)
    house.context.stopping.set()
    # several ticks
    time.sleep(0.5)
    assert working.is_alive()
    house.log.with_name("go").touch()
    working.join(30)
    job = house.job(job_id)
    assert (job.status, job.attempt, job.uncounted) == (Status.COMPLETED, 1, 0)


def test_inputs_reach_the_program_as_files(house: House) -> None:
    house.context.artifacts.put_bytes("video_x/inputs/first_frame.png", b"png", "image/png")
    house.context.artifacts.put_bytes("video_x/inputs/video.mp4", b"mp4", "video/mp4")
    inputs = {"first_frame": "video_x/inputs/first_frame.png", "video": "video_x/inputs/video.mp4"}
    house.submit("finish", inputs=inputs)
    house.work()
    (run,) = house.runs()
    assert Path(run["inputs"]["first_frame"]).read_bytes() == b"png"
    # a clip that is continued takes over as many frames as the card can hold
    assert run["request"]["extend"] == {"overlap_frames": 5}


def test_prompts_of_segments_keep_their_order(house: House) -> None:
    spec = JobSpec(
        kind="video",
        pool="video",
        model="fake-wan",
        params=PARAMS,
        prompts={"prompt": "finish", **{f"segment.{index}": f"part {index}" for index in (10, 2, 0, 1)}},
    )
    store.submit(house.db, spec)
    house.work()
    (run,) = house.runs()
    assert run["request"]["segment_prompts"] == ["part 0", "part 1", "part 2", "part 10"]


def test_a_job_for_another_model_is_refused(house: House) -> None:
    spec = JobSpec(kind="video", pool="video", model="other", params=PARAMS, prompts={"prompt": "finish"})
    job_id = store.submit(house.db, spec).id
    house.work()
    job = house.job(job_id)
    assert (job.status, job.error_code, job.gpu_seconds) == (Status.FAILED, "invalid_request", None)
    assert not house.log.exists()


def test_a_program_that_dies_idle_is_started_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = house.worker.ensure_program(house.context)
    program.kill()
    again, card = house.worker.ensure_program(house.context)
    assert (again.pid != program.pid, card.name) == (True, "fake-wan")


def test_a_model_that_does_not_load_is_said(house: House, tmp_path: Path) -> None:
    message = json.dumps({"v": 1, "type": "failed", "code": "model_error", "message": "vae: is missing."})
    for program, expected in ((f"print({message!r})", "vae: is missing"), ("raise SystemExit(3)", "exit code 3")):
        broken = VideoWorker(replace_name(house.settings, tmp_path), "broken", [sys.executable, "-c", program])
        with pytest.raises(ProgramFailed, match=expected):
            broken.start(house.context)


def test_a_load_that_hangs_is_killed_and_costs_an_attempt(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_worker, "LOAD_S", 0.5)
    reasons: list[str] = []
    monkeypatch.setattr(video_worker, "_leave", reasons.append)
    job_id = house.submit("finish")
    hung = VideoWorker(house.settings, "hung", [sys.executable, "-c", "import time; time.sleep(600)"])
    hung.work_dir.mkdir(parents=True)
    for expected in (Status.QUEUED, Status.FAILED):
        claim = claims.claim_next(house.db, "video", "hung@test:2", 20.0)
        assert claim is not None
        hung.handle(house.context, claim)
        assert house.job(job_id).status is expected
    job = house.job(job_id)
    assert (job.error_code, job.attempt) == ("worker_crashed", 2)
    assert job.error_message == "The video program was not ready after 0.5 s."
    assert len(reasons) == 2


def test_a_card_that_cannot_be_read_leaves_no_program(house: House, tmp_path: Path) -> None:
    ready = json.dumps({"v": 1, "type": "ready", "card": {**CARD, "v": 99}})
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); print({ready!r}, flush=True)"
    broken = VideoWorker(
        replace_name(house.settings, tmp_path), "odd", [sys.executable, "-c", f"{code}; time.sleep(600)"]
    )
    with pytest.raises(ProgramFailed, match=r"its card cannot be used: .*version"):
        broken.start(house.context)
    assert not is_alive(int(pid_file.read_text()))


def test_a_program_that_cannot_be_run_is_said(house: House, tmp_path: Path) -> None:
    absent = VideoWorker(house.settings, "absent", [str(tmp_path / "no-such-program")])
    with pytest.raises(ProgramFailed, match=r"it cannot be run: .*No such file"):
        absent.ensure_program(house.context)


def test_two_workers_of_one_name_do_not_share_a_folder(house: House) -> None:
    kept = house.worker.work_dir / "clip"
    kept.mkdir()
    second = VideoWorker(house.settings, house.worker.work_dir.name, house.worker.command)
    with pytest.raises(ConfigurationError, match="runs in this data folder; give this one another --name"):
        second.start(house.context)
    assert kept.is_dir()
    kept.rmdir()


def test_a_keeper_that_fails_ends_the_worker(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(video_worker, "_leave", reasons.append)
    monkeypatch.setattr(video_worker, "SEEN_S", 0.01)

    def fail(*_: object) -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(house.worker, "ensure_program", fail)
    house.worker._keep(house.context)
    assert reasons == ["its keeper has failed"]


def test_a_pool_has_one_model() -> None:
    settings = Settings(models=(ModelEntry(name="a", kind="video"), ModelEntry(name="b", kind="video", pool="fast")))
    assert find_entry(settings, "fast").name == "b"
    with pytest.raises(ConfigurationError, match="exactly one video model in the settings, got none"):
        find_entry(settings, "slow")


def test_the_worker_imports_no_torch() -> None:
    code = (
        "import sys, workers.video_worker, workers.gpu_process\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'video'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})


def replace_name(settings: Settings, folder: Path) -> Settings:
    return settings.model_copy(update={"data_dir": folder / "other"})


def void(value: object) -> None:
    """A thread's target returns nothing."""
