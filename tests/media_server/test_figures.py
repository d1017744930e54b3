"""Counts of several processes in one table, and what a scrape reads of it, on each database."""

import threading
from pathlib import Path

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from media_server.figures import HTTP_SECONDS, STEP_SECONDS, TOKENS, Counts, Recorder
from media_server.jobs import claims, store
from media_server.jobs.database import Database
from media_server.jobs.spec import JobSpec, Result
from media_server.metrics import read_figures


def scrape(db: Database, folder: Path) -> dict[str, float]:
    text = generate_latest(read_figures(db, {"data": folder}, None).registry()).decode()
    return {
        f"{sample.name.removeprefix('media_server_')}{sorted(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_writers_that_meet_lose_nothing(db: Database, tmp_path: Path) -> None:
    """Many threads count the same figures in other orders: each is there in the end, and none waits for another."""
    failed: list[BaseException] = []

    def count(number: int) -> None:
        try:
            for _ in range(10):
                counts = Counts()
                for model in ("a", "b", "c")[:: 1 if number % 2 else -1]:
                    counts.observe(STEP_SECONDS, model, seconds=0.25)
                counts.count(TOKENS, "prompt", amount=2.0)
                db.add_counts(counts.amounts)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=count, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    found = scrape(db, tmp_path)
    for model in ("a", "b", "c"):
        assert found[f"step_seconds_count['{model}']"] == 60
        assert found[f"step_seconds_sum['{model}']"] == 15.0
    assert found["text_tokens_total['prompt']"] == 120


def test_jobs_that_end_in_one_transaction_are_counted_each(db: Database, tmp_path: Path) -> None:
    for _ in range(2):
        store.submit(db, JobSpec(kind="video", pool="video"))
    held = claims.claim_next(db, "video", "w", 20.0)
    assert held is not None and claims.complete(db, held, Result(gpu_seconds=2.5))
    found = scrape(db, tmp_path)
    assert found["jobs_ended_total['completed', 'video']"] == 1
    assert found["jobs['queued', 'video']"] == found["queue_jobs['video']"] == 1
    assert found["gpu_seconds_total[]"] == 2.5
    # what did not happen is not there
    assert "jobs_ended_total['failed', 'video']" not in found and "broker_up[]" in found


def test_a_recorder_writes_in_time_and_at_its_end(db: Database, tmp_path: Path) -> None:
    recorder = Recorder(db)
    recorder.observe(HTTP_SECONDS, "/a", "GET", "200", seconds=0.1)
    recorder.close()
    assert scrape(db, tmp_path)["http_request_seconds_count['/a', '200', 'GET']"] == 1
