"""The command line: commands by entry point, imported when called; errors as one line with their exit code."""

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from media_server import cli
from media_server.cli import GROUP, LazyGroup, run

PLUGIN = '''
import sys

def shout(argv):
    """Say it louder."""
    sys.stdout.write(" ".join(argv).upper())
    return 7
'''


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, EntryPoint]:
    (tmp_path / "a_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_plugin", raising=False)
    names = ("shout", "keys.create", "keys.list")
    return {name: EntryPoint(name, "a_plugin:shout", GROUP) for name in names}


def test_commands_are_plain_functions_nested_by_dots(plugins: dict[str, EntryPoint]) -> None:
    group = LazyGroup("media-server", plugins)
    context = click.Context(group)
    assert group.list_commands(context) == ["keys", "shout"]
    keys = group.get_command(context, "keys")
    assert isinstance(keys, click.Group) and keys.list_commands(context) == ["create", "list"]
    # the function reads its own options, --help among them
    for arguments in (["shout"], ["keys", "create"]):
        result = CliRunner().invoke(group, [*arguments, "--help", "-x", "a"], standalone_mode=False)
        assert (result.output, result.return_value) == ("--HELP -X A", 7)


def test_help_says_what_each_command_does_without_importing_it(plugins: dict[str, EntryPoint]) -> None:
    result = CliRunner().invoke(LazyGroup("media-server", plugins), ["--help"])
    assert "Say it louder." in result.output
    assert "a_plugin" not in sys.modules


def test_every_command_of_the_contract_is_installed_and_described() -> None:
    names = {entry.name for entry in entry_points(group=GROUP)}
    processes = {"up", "api", "worker", "engine", "storyboards", "media", "deliveries", "sweeper", "batches"}
    asked = {"make", "clip", "chat", "jobs", "cancel", "models", "usage"}
    keys = {"keys.create", "keys.list", "keys.revoke", "keys.limit"}
    assert processes | asked | keys <= names
    result = CliRunner().invoke(cli.command_group(), ["--help"])
    listed = {line.split()[0]: line for line in result.output.partition("Commands:")[2].splitlines() if line.strip()}
    assert all(len(listed[name].split()) > 2 for name in names if "." not in name), result.output


def test_listing_jobs_imports_no_model_code() -> None:
    code = (
        "import sys; from media_server.cli import run; code = run(['jobs', '--url', 'http://127.0.0.1:9']);"
        "heavy = {'torch', 'transformers', 'diffusers', 'sqlalchemy', 'celery', 'av'} & set(sys.modules);"
        "print(code, sorted(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "3 []\n"
    assert result.stderr == "media-server: no service answers at http://127.0.0.1:9; start one with `media-server up`\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["make"], 2, "Missing argument 'IDEA'"),
        (["nothing"], 2, "No such command 'nothing'"),
        (["make", "x", "--seconds", "long"], 2, "not a valid float"),
        (["make", "x", "--data", "d"], 2, "--data belongs to --serve"),
        (["make", "x", "--serve", "--url", "http://h"], 2, "--url names another"),
        (["clip", "x", "--image", "/no/such.png"], 2, "does not exist"),
        (["jobs", "--watch"], 2, "--watch needs the id of a job"),
        (["cancel", "video_1", "--url", "http://127.0.0.1:9"], 3, "no service answers at http://127.0.0.1:9"),
    ],
)
def test_errors_are_one_clear_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and said.out == ""


HALVES = {
    "half an answer": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-ty",
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "broken gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nabcd",
}
NOT_OURS = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>"
COMMANDS = [
    ["make", "x"],
    ["clip", "x"],
    ["chat", "hello"],
    ["chat", "hello", "--model", "m"],
    ["jobs"],
    ["jobs", "video_1"],
    ["cancel", "video_1"],
    ["models"],
    ["usage"],
]


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """Listen on loopback, give each connection the next of the answers, the last one from then on, and close it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for number in itertools.count():
                with contextlib.suppress(OSError), listener.accept()[0] as client:
                    client.recv(1 << 16)
                    client.sendall(answers[min(number, len(answers) - 1)])
                if listener.fileno() < 0:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            # wakes the thread, which closing does not
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join()


@pytest.mark.parametrize("answer", HALVES)
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_an_answer_that_breaks_off_is_one_clear_line(
    arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(HALVES[answer]) as url:
        assert run([*arguments, "--url", url]) == 3
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"media-server: the answer of {url} broke off before its end: ") and said.out == ""


@pytest.mark.parametrize("arguments", [*COMMANDS[:3], *COMMANDS[4:]], ids=" ".join)
def test_another_server_at_the_address_is_one_clear_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(NOT_OURS) as url:
        assert run([*arguments, "--url", url]) == 3
    assert capsys.readouterr().err == f"media-server: what answers at {url} is no media-server: got '<html>'\n"


def test_chat_that_breaks_off_shows_what_it_got_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    delta = b'data: {"choices": [{"delta": {"content": "half a wo"}}]}\n\n'
    for answer in (
        head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(delta), delta),
        head + b"connection: close\r\n\r\n" + delta,
    ):
        with answering(answer) as url:
            assert run(["chat", "hello", "--model", "m", "--url", url]) == 3
        said = capsys.readouterr()
        assert said.out == "half a wo\n"
        (line,) = said.err.splitlines()
        assert line.startswith(f"media-server: the answer of {url} broke off before its end: ")


@pytest.mark.parametrize("url", ["http://[", "http://a b", "nowhere"])
def test_an_address_that_is_none_is_one_clear_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["jobs", "--url", url]) in (1, 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("media-server: ") and url in line


def test_a_bad_setting_is_one_clear_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIA_SERVER_PROT", "8000")
    assert run(["models", "--local"]) == 1
    assert capsys.readouterr().err == "media-server: MEDIA_SERVER_PROT is not a setting of this release.\n"


def test_local_models_need_no_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--local", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(model["name"], model["kind"]) for model in found] == [
        ("tiny-wan", "video"),
        ("smollm2-135m-instruct", "text"),
    ]
