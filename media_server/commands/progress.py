"""How far a job or a film is, from its events: bars on a terminal, a line for each change of state elsewhere."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

_STAGES = {
    "storyboard": "writing",
    "load": "loading the model",
    "encode_prompt": "reading the prompt",
    "denoise": "denoising",
    "decode": "decoding",
    "encode_video": "writing the file",
}
# a prompt of the storyboard, as soon as its string is closed
_PROMPT = re.compile(r'"prompt"\s*:\s*("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class Bar:
    """What one job shows: the name of its bar, and for a shot its number."""

    title: str
    shot: int | None = None


# looks a job of the film up: a child's id gives its bar
Lookup = Callable[[str], Bar]


class JobBars:
    """Bars for a job and its children, one each, in the order in which they appear."""

    def __init__(self, console: Console, lookup: Lookup) -> None:
        self.console = console
        self.lookup = lookup
        self.progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=22),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {}
        self.text: dict[str, str] = {}
        self.num_prompts: dict[str, int] = {}

    def show(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Follow the events until they end."""
        with self.progress:
            for event in events:
                self.take(event)

    def take(self, event: Mapping[str, Any]) -> None:
        """Show one event."""
        job_id, type, data = event["job_id"], str(event["type"]), event["data"]
        if job_id.startswith("film_"):
            return
        task = self._task_of(job_id)
        title = self.lookup(job_id).title
        if type in ("job.started", "job.attempt"):
            is_again = int(event.get("attempt", 1)) > 1
            self._update(task, completed=0.0, detail="started again" if is_again else "started")
            self._say(f"{title}: started" + (f" (attempt {event['attempt']})" if is_again else ""))
        elif type == "job.progress":
            self._show_text(job_id, data.get("text"))
            self._update(task, completed=data.get("progress"), detail=_describe(data))
        elif type == "job.position":
            ahead = int(data["queue_position"])
            self._update(task, detail=f"waiting, {ahead} before it" if ahead else "waiting, next")
        elif type.endswith(".completed"):
            self._update(task, completed=100.0, detail="done")
            self._say(f"{title}: done")
        elif type.endswith((".failed", ".cancelled")):
            error = data.get("error") or {}
            state = type.rpartition(".")[2]
            self._update(task, detail=state)
            self.console.print(f"{title}: {state}" + (f": {error.get('message')}" if error else ""), highlight=False)

    def _task_of(self, job_id: str) -> TaskID:
        if job_id not in self.tasks:
            self.tasks[job_id] = self.progress.add_task(self.lookup(job_id).title, total=100.0, detail="waiting")
        return self.tasks[job_id]

    def _update(self, task: TaskID, *, detail: str, completed: float | None = None) -> None:
        self.progress.update(task, completed=completed, detail=detail)

    def _show_text(self, job_id: str, delta: object) -> None:
        """Show each prompt of a storyboard above the bars once it has been written whole."""
        if not isinstance(delta, str) or not delta:
            return
        self.text[job_id] = self.text.get(job_id, "") + delta
        prompts = _PROMPT.findall(self.text[job_id])
        for number in range(self.num_prompts.get(job_id, 0), len(prompts)):
            self.console.print(f"  {number + 1}. {prompts[number][1:-1]}", highlight=False, markup=False)
        self.num_prompts[job_id] = len(prompts)

    def _say(self, line: str) -> None:
        if not self.console.is_terminal:
            self.console.print(line, highlight=False, markup=False)


def _describe(data: Mapping[str, Any]) -> str:
    """Say a stage in words: `denoising 12/30, 8 s left`."""
    stage = str(data.get("stage") or "")
    words = _STAGES.get(stage, stage.replace("_", " "))
    if data.get("total_steps"):
        words += f" {data.get('step') or 0}/{data['total_steps']}"
    if data.get("eta_s"):
        words += f", {float(data['eta_s']):.0f} s left"
    return words
