"""A pool worker for tests, run as a program: does what a job's parameters say."""

from media_server.errors import JobError
from media_server.jobs.claims import complete, fail, release
from media_server.jobs.spec import Claim, Result
from media_server.settings import load_settings
from workers.pool_worker import PoolContext, run_pool_worker


def handle(context: PoolContext, claim: Claim) -> None:
    """Do one job: finish at once, raise, fail, or wait until the worker stops."""
    match claim.job.params["do"]:
        case "finish":
            complete(context.db, claim, Result(result={"worker": context.worker}))
        case "raise":
            raise RuntimeError("a fault of the handler")
        case "fail":
            fail(context.db, claim, JobError("model_error", "as asked"))
        case "wait":
            context.stopping.wait(30)
            release(context.db, claim)


if __name__ == "__main__":
    raise SystemExit(run_pool_worker(load_settings(), "test", "tester", 1, handle))
