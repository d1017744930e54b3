"""A seeded random campaign against the real service: killed, stopped, cut off and filled up, it must lose nothing.

`python -m tests.faults.campaign --actions N [--seed S] [--out FILE] [--resume]`, or `make faults N=1000`. The
processes are those of `media-server up`: API, video worker, media, storyboard, delivery workers, sweeper, Valkey, and
with --text the language engine. The GPU program is a stand-in (stand_in.py) unless --real says otherwise: loading the
real one would be most of a campaign. A seed gives the same draws in the same order; when each meets the service is the
machine's.

What must hold is looked at from outside: by HTTP (customer.py, front.py), in a webhook receiver's log (receiver.py),
and in the data folder once everything has ended (invariants.py). The result is a JSON file with all that was done and
found, written as the campaign goes: with --resume one that was broken off is gone on with, in another sitting.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.result import NotResumable, Result
from tests.faults.sitting import Sitting

RESULTS = Path(__file__).with_name("results")


def main(argv: Sequence[str]) -> int:
    """Run a campaign; returns 1 if it has found something, 2 if there is none to go on with."""
    arguments = _parse(argv)
    out = arguments.out or RESULTS / "campaign.json"
    if arguments.resume:
        try:
            result = Result.read(out)
        except NotResumable as error:
            print(f"campaign: {error}", file=sys.stderr)
            return 2
    else:
        result = Result(arguments.seed if arguments.seed is not None else int(time.time()), arguments.actions)
    wanted = result.num_wanted - result.num_checked
    seed = result.next_seed()
    print(f"campaign: seed {seed}, {wanted} of {result.num_wanted} actions, result in {out}", flush=True)
    if wanted <= 0:
        return 1 if result.findings else 0
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    text_model = convert_text_model(folder / "text") if arguments.text else None
    sitting = Sitting(seed, folder, text_model=text_model, is_real=arguments.real, slack=arguments.slack)

    def write(sitting: Sitting) -> None:
        result.write(out, sitting.result())
        print(f"campaign: {len(sitting.done)} actions, {len(sitting.customer.book)} jobs", flush=True)

    sitting.run(wanted, arguments.seconds, write, check_every=arguments.check_every)
    result.write(out, sitting.result(), is_over=True)
    for finding in result.findings:
        print(f"campaign: {finding}", file=sys.stderr)
    if sitting.findings:
        print(f"campaign: the service's log is {sitting.service.log}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if result.findings else 0


def convert_text_model(folder: Path) -> Path:
    """Convert the embedded language model once, for every start of a sitting."""
    code = "import sys, pathlib; from llm.checkpoints.embedded import ensure_embedded; ensure_embedded("
    subprocess.run([sys.executable, "-c", f"{code}pathlib.Path(sys.argv[1]))", str(folder)], check=True)
    return folder


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--actions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, help="stop acting after so long")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, help="result file (default tests/faults/results/campaign.json)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the campaign of the result file: its seed, what is left of it"
    )
    parser.add_argument("--check-every", type=int, default=250, help="actions between two looks (default 250)")
    parser.add_argument("--real", action="store_true", help="the real GPU program on the embedded model")
    parser.add_argument("--text", action="store_true", help="with the embedded language model, and films")
    parser.add_argument("--slack", type=float, default=1.0, help="factor of every limit, for a machine with other work")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
