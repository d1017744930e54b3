"""Faults that users of servers like this one have reported, each with the tests that show it cannot happen here."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
JOBS = {
    # celery#5935
    "a job that outlasts the broker's visibility timeout runs twice": (
        "media_server/jobs/test_doorbell.py::test_a_message_is_done_when_it_is_taken",
        "media_server/jobs/test_claims.py::test_a_lapsed_lease_goes_to_the_next_worker_and_the_first_one_loses",
    ),
    # celery#10302
    "a worker stays silent after the broker was reset": (
        "workers/test_pool_worker.py::test_doorbells_faults_a_restarted_broker_and_the_drain",
        "workers/test_pool_worker.py::test_without_a_broker_jobs_are_found_by_looking",
        "e2e/test_processes.py::test_a_killed_api_and_a_killed_broker_come_back",
    ),
    # celery#6009
    "memory is held after a task": ("workers/test_gpu_program.py::test_clip_after_clip_takes_no_more_memory",),
    # vllm-omni#6403
    "DELETE or a cancel leaves the work running": (
        "media_server/jobs/test_store.py::test_deleting_a_running_job_stops_it_first",
        "workers/test_video_worker.py::test_a_cancel_is_confirmed_when_the_program_has_stopped",
        "workers/test_video_worker.py::test_a_cancel_that_is_not_heard_ends_in_a_kill",
        "workers/test_gpu_program.py::test_a_run_whose_worker_no_longer_says_that_it_holds_its_lease_ends",
    ),
    # vllm-omni#6933
    "a client that leaves orphans its work, or ends a job": (
        "media_server/text/test_chat.py::test_a_client_that_leaves_ends_its_request",
        "media_server/text/test_metering.py::test_a_client_that_leaves_frees_its_place_and_pays_for_what_was_written",
        "media_server/routes/test_acceptance.py::test_prefer_wait_gives_up_in_time",
    ),
    # vllm-omni#2327
    "after one job that lacked memory every later one fails": (
        "workers/test_gpu_faults.py::test_its_own_job_fails_by_name_and_the_next_runs_clean",
        "workers/test_video_worker.py::test_out_of_memory_fails_one_job_and_not_the_next",
    ),
    # ComfyUI#2566
    "a cancel hits another job": (
        "workers/test_gpu_program.py::test_runs_one_after_the_other_and_a_cancelled_one_leaves_nothing",
        "media_server/jobs/test_interleavings.py::test_any_interleaving_keeps_the_invariants",
    ),
    # cog#2229
    "a dead webhook receiver blocks the server": (
        "workers/test_delivery_worker.py::test_a_slow_receiver_slows_nothing_else",
        "workers/test_delivery_worker.py::test_a_dead_name_server_holds_up_nobody_else",
    ),
    # ComfyUI#16204
    "a submit that is sent again is made and paid for twice": (
        "media_server/routes/test_acceptance.py::test_a_post_that_is_sent_again_after_a_crash_makes_one_job",
        "media_server/jobs/test_idempotency.py::test_of_many_at_once_one_makes_a_job",
    ),
    # vllm-omni#2227
    "a restart loses jobs or their metadata": (
        "e2e/test_film.py::test_a_film_outlives_two_deaths_of_the_service",
        "media_server/jobs/test_lists.py::test_metadata_goes_with_the_job",
        "faults/test_crash_points.py::test_who_dies_here_loses_nothing",
    ),
    # llm-d#2428
    "a poll reaches a replica that does not know the job": (
        "e2e/test_two_machines.py::test_both_machines_make_clips_that_the_front_serves",
    ),
}


@pytest.mark.parametrize("fault", JOBS)
def test_it_has_tests_that_exist(fault: str) -> None:
    assert JOBS[fault]
    for test in JOBS[fault]:
        file, _, name = test.partition("::")
        found = ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8")))
        assert name in {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}, test
