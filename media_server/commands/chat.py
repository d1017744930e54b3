"""`media-server chat`: one answer, or a conversation line by line."""

import sys
from typing import Any

import click
from rich.console import Console

from media_server.client import Client
from media_server.commands.options import connect, say_json, service_options


@click.command()
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="What the model is told before everything else.")
@click.option("--model", help="Language model by name.")
@click.option("--max-tokens", type=int, help="Longest answer.")
@click.option("--temperature", type=float)
@click.option("--seed", type=int, help="The same seed draws the same answer again.")
@service_options
def chat(
    prompt: str | None,
    system: str | None,
    model: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Talk to the language model; without a prompt, line by line until end of input."""
    options = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    messages = [{"role": "system", "content": system}] if system else []
    with connect(url) as client:
        if model is None:
            options["model"] = _default_model(client)
        if prompt is None and not sys.stdin.isatty():
            prompt = sys.stdin.read().strip()
        if prompt is not None:
            _answer(client, options, [*messages, {"role": "user", "content": prompt}], as_json)
            return
        while True:
            try:
                line = click.prompt("you", prompt_suffix="> ")
            except click.Abort:
                click.echo()
                return
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(client, options, messages, as_json)})


def _default_model(client: Client) -> str | None:
    """Name the first language model that the service has; None leaves the choice to it."""
    return next((model["id"] for model in client.get("/v1/models")["data"] if model.get("kind") == "text"), None)


def _answer(client: Client, options: dict[str, Any], messages: list[dict[str, str]], as_json: bool) -> str:
    """Show one answer as it is written; returns its text."""
    body = {name: value for name, value in options.items() if value is not None}
    parts: list[str] = []
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    console = Console(stderr=True, quiet=as_json)
    try:
        with console.status("thinking") as status:
            for chunk in client.chat({**body, "messages": messages, "stream_options": {"include_usage": True}}):
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    finish_reason = choice.get("finish_reason") or finish_reason
                    delta = choice["delta"].get("content") or ""
                    if delta and not as_json:
                        status.stop()
                        click.echo(delta, nl=False)
                    parts.append(delta)
    finally:
        # also before the line that says why there is no more of it
        if any(parts) and not as_json:
            click.echo()
    text = "".join(parts)
    if as_json:
        say_json({"content": text, "finish_reason": finish_reason, "usage": usage})
    elif not text:
        click.echo()
    return text
