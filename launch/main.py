"""Parse the command line, then hand over to one module per command. Imports nothing heavy."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence

from capo.launch.exit_codes import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED

_RUN = "a run's folder, as in runs/quickstart-seed0-20260101-120000"
_CONFIG = "a TOML file, or the name of a packaged one"

# Every other command does work that must go on even when nobody reads its output any more.
_ONLY_TELL = ("check", "convert", "export", "keygen", "replay", "report", "status")

_AddParser = Callable[..., argparse.ArgumentParser]

_OVERVIEW = """\
Train LLM agents with reinforcement learning on complete actions (CAPO, arXiv 2604.18401).

  capo run configs/quickstart.toml            learner and actors on this machine
  capo learner CONFIG                         one learner; actors attach to the address it prints
  capo actor --connect tcp://HOST:PORT        one more rollout node, at any time
  capo replay RUN --update K                  recompute an update offline, bit for bit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Failures are one sentence on stderr."""
    from capo.launch.output import unfailing

    with unfailing("stderr"):
        try:
            with unfailing("stdout"):
                args = build_parser().parse_args(arguments)
            only_tells = args.command in _ONLY_TELL
            with contextlib.nullcontext() if only_tells else unfailing("stdout"):
                return _run(args)
        except KeyboardInterrupt:
            print("capo: interrupted.", file=sys.stderr)
            return EXIT_INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    from capo.configs.load import InvalidConfigError
    from capo.launch.output import abandon_output, finish_output
    from capo.protocol.errors import (
        CapoError,
        CheckpointError,
        ConfigError,
        EnvError,
        RunFileError,
    )
    from capo.protocol.sayings import plain

    command: Callable[[argparse.Namespace], int] = _command(args.command)

    def tell(sentence: str) -> None:
        print(f"capo {args.command}: {plain(sentence)}", file=sys.stderr)

    try:
        code = command(args)
        finish_output()
        return code
    except (InvalidConfigError, ConfigError, RunFileError, CheckpointError, EnvError) as error:
        tell(str(error))
        return EXIT_BAD_INPUT
    except (CapoError, ModuleNotFoundError) as error:
        tell(_explain(error))
        return EXIT_FAILURE
    except OSError as error:
        abandon_output()
        if isinstance(error, BrokenPipeError) and args.command in _ONLY_TELL:
            return 0  # the reader has had enough, as `head` has
        where = f"{error.filename}: " if error.filename else ""
        tell(f"{where}{error.strerror or error}.")
        return EXIT_FAILURE


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="capo", description=_OVERVIEW, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"capo {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_training(commands.add_parser)
    _add_results(commands.add_parser)
    _add_tools(commands.add_parser)
    return parser


def _add_training(add: _AddParser) -> None:
    run = add("run", help="learner and actors on this machine")
    run.add_argument("config", nargs="?", help=_CONFIG)
    run.add_argument("--resume", metavar="RUN", help="go on with this run directory")
    run.add_argument("--actors", type=int, help="actors to start here (default: the config's)")
    _add_overrides(run)

    learner = add("learner", help="one learner; prints the address for actors")
    learner.add_argument("config", nargs="?", help=_CONFIG)
    learner.add_argument("--resume", metavar="RUN", help="go on with this run directory")
    _add_overrides(learner)

    actor = add("actor", help="one rollout node; needs only the learner's address")
    actor.add_argument(
        "--connect",
        required=True,
        metavar="ADDRESS|RUN",
        help="tcp://HOST:PORT, or the run's folder, which always has the current address",
    )
    actor.add_argument("--name", default="", help="what reports call it (default: host and pid)")
    actor.add_argument("--capacity", type=int, default=0, help="episodes at once (default: config)")
    _add_keys(actor)
    actor.add_argument(
        "--give-up-after",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="leave when no learner answers for so long (default: wait forever)",
    )

    # Started by a learner for its other ranks, not by people, so it has no line in the help.
    add("rank")


def _add_results(add: _AddParser) -> None:
    evaluate = add("eval", help="play held-out games with a run's checkpoint")
    evaluate.add_argument("run", metavar="RUN", help=_RUN)
    evaluate.add_argument("--update", type=int, help="the checkpoint's version (default: newest)")
    evaluate.add_argument("--games", type=int, help="how many games (default: the config's)")

    replay = add("replay", help="list updates, or recompute one offline")
    replay.add_argument("run", metavar="RUN", help=_RUN)
    replay.add_argument("--update", type=int, metavar="K", help="recompute update K")
    _add_overrides(replay, "what if: change a value and compare with what was recorded")

    report = add("report", help="tables and a plot of a run")
    report.add_argument("run", metavar="RUN", help=_RUN)
    report.add_argument("--plot", metavar="PNG", help="also write the curves as a picture")

    export = add("export", help="a run's episodes as JSON lines")
    export.add_argument("run", metavar="RUN", help=_RUN)
    export.add_argument("--output", default="-", metavar="FILE", help="default: standard output")


def _add_tools(add: _AddParser) -> None:
    check = add("check", help="print the resolved config and plan; start nothing")
    check.add_argument("config", help=_CONFIG)
    _add_overrides(check)

    status = add("status", help="who waits for whom, and since when")
    status.add_argument("run", metavar="RUN|ADDRESS", help=f"{_RUN}, or a learner's address")
    _add_keys(status)

    keygen = add("keygen", help="make the keys of a learner and its actors")
    keygen.add_argument("--add", metavar="NAME", help="one more actor's key in an existing folder")
    keygen.add_argument("folder", help="where the key files go; made if missing")
    keygen.add_argument(
        "--actors", type=int, default=1, help="how many actor keys to make (default: 1)"
    )

    convert = add("convert", help="a GGUF model file to a Hugging Face folder")
    convert.add_argument("gguf", help="the .gguf file")
    convert.add_argument("folder", help="where the converted model goes")


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", default="", metavar="FILE", help="key file from capo keygen")
    parser.add_argument(
        "--insecure", action="store_true", help="talk to another machine without encryption"
    )


def _add_overrides(parser: argparse.ArgumentParser, help_text: str = "change one value") -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help=f"{help_text}, as in learner.policy_lr=1e-6; may be repeated",
    )


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    from importlib import import_module

    module = {"eval": "evaluate"}.get(name, name)
    command: Callable[[argparse.Namespace], int] = import_module(f"capo.launch.{module}").command
    return command


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            f"the Python package {error.name!r} is not installed here; install capo-rl[cpu] or "
            "capo-rl[gpu] for learners and actors."
        )
    return str(error)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("capo-rl")
    except PackageNotFoundError:
        return "0 (not installed)"


if __name__ == "__main__":
    sys.exit(main())
