"""`media-server`: one command line, gathered from every package by entry point (group media_server.commands).

A command's name is its path, dots nest (`keys.create` is `media-server keys create`); its value is a function of the
remaining arguments that returns an exit code or None, or a click command. A command is imported when it is called and
not before, so that listing jobs never waits for torch.

Exit codes: 0 done, 1 the job or the command failed, 2 wrong usage, 3 no service answers, 4 the service refused.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points, version

import click

from media_server.commands.failure import EXIT_FAILED, EXIT_INTERRUPTED, CommandFailed
from media_server.errors import MediaServerError

GROUP = "media_server.commands"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name, and leave with its exit code."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run the command that the arguments name; returns the exit code."""
    try:
        result = command_group().main(list(argv), prog_name="media-server", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.message)
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except CommandFailed as error:
        click.echo(f"media-server: {error.message}", err=True)
        return error.exit_code
    except MediaServerError as error:
        click.echo(f"media-server: {error.message}", err=True)
        return EXIT_FAILED
    except (click.Abort, KeyboardInterrupt):
        click.echo("media-server: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has seen enough
        sys.stderr.close()
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def command_group() -> click.Group:
    """Make the group of all installed commands."""
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    group = LazyGroup("media-server", entries, help="An idea, a prompt or an image goes in, film and text come back.")
    return click.version_option(version("media-server"), prog_name="media-server")(group)


class LazyGroup(click.Group):
    """Commands that are found by name and imported when they are called."""

    def __init__(self, name: str, entries: Mapping[str, EntryPoint], help: str | None = None) -> None:
        super().__init__(name, help=help)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands and groups of this level."""
        return sorted({path.partition(".")[0] for path in self.entries})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of this name, or make the group of those below it."""
        if entry := self.entries.get(cmd_name):
            loaded = entry.load()
            return loaded if isinstance(loaded, click.Command) else _wrap(cmd_name, loaded)
        below = {path.removeprefix(f"{cmd_name}."): e for path, e in self.entries.items() if _is_below(path, cmd_name)}
        return LazyGroup(cmd_name, below) if below else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their summaries, which are read, not imported."""
        with formatter.section("Commands"):
            names = self.list_commands(ctx)
            formatter.write_dl([(n, _summary(self.entries[n]) if n in self.entries else f"{n} …") for n in names])


def _is_below(path: str, group: str) -> bool:
    return path.startswith(f"{group}.")


def _wrap(name: str, function: Callable[[list[str]], int | None]) -> click.Command:
    """Make a command of a plain function, which reads all its arguments itself, --help among them."""
    return click.Command(
        name,
        callback=lambda arguments: function(list(arguments)),
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )


def _summary(entry: EntryPoint) -> str:
    """Read the first line of a command's docstring from its source; importing it could cost seconds."""
    spec = importlib.util.find_spec(entry.module)
    if spec is None or spec.origin is None:
        return ""
    with open(spec.origin, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


if __name__ == "__main__":
    main()
