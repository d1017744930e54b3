"""The command that scores clips and models: files, a list with a model of any kind, the shipped checkpoint."""

import json
from dataclasses import asdict
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

from video.tiny.card import SMALL, WHOLE, make_card
from video.tiny.draw import draw
from video.tiny.score import is_taught, main
from video.tiny.scorer_prompts import make_prompts
from video.tiny.world import compose, sample_scene


def test_the_command_reads_a_video_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = draw([compose([("car", "red", "large", "left")], "blue", seed=4)], 17, 96, 160)[0]
    file = tmp_path / "clip.mp4"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=16, options={"crf": "18"})
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        for frame in clip:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame.numpy(), format="rgb24")))
        container.mux(stream.encode())
    assert main([str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["count"], told["backdrop"]) == (1, "blue")
    thing = told["things"][0]
    assert (thing["kind"], thing["color"], thing["movement"]["motion"]) == ("car", "red", "left")


def test_the_command_scores_a_list_with_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [p for p in make_prompts() if p.relation is None and p.camera == "none"][:3]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(asdict(p)) for p in prompts))

    by_text = {prompt.prompt: prompt for prompt in prompts}
    asked = []

    def perfect(text: str, seed: int) -> torch.Tensor:
        asked.append(seed)
        prompt = by_text[text]
        return draw([sample_scene(prompt.seed, prompt.split)], 25, 96, 96)[0]

    out = tmp_path / "answers.jsonl"
    chosen = ["--prompts", str(file), "--sheet", str(tmp_path / "sheet.png"), "--json", str(out)]
    assert main(chosen, perfect) == 0
    total = capsys.readouterr().out.splitlines()[-2].split()
    assert (total[:2], total[-1]) == (["total", "3"], "100.0")
    assert asked == [0, 1, 2]
    assert [json.loads(line)["all"] for line in out.read_text().splitlines()] == [True] * 3
    assert Image.open(tmp_path / "sheet.png").width > 500
    assert main([*chosen, "--first", "1"], perfect) == 0
    assert asked == [0, 1, 2, 0]


def test_the_command_makes_clips_with_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(asdict(p)) for p in make_prompts()[:2]))
    assert main(["--prompts", str(file), "--frames", "5", "--steps", "1"]) == 0
    assert "total          2" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["clip.mp4", "--prompts", "list.jsonl"]])
def test_the_command_takes_files_or_a_list(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2


def test_what_a_model_was_taught_is_read_from_its_card() -> None:
    prompts = make_prompts()
    few = [prompt for prompt in prompts if is_taught(prompt, make_card(SMALL, "0"))]
    assert 100 < len(few) < len(prompts)
    assert all(prompt.relation is None and prompt.camera == "none" for prompt in few)
    assert all(is_taught(prompt, make_card(WHOLE, "0")) for prompt in prompts)
