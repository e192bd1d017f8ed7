"""The command line's one entry: finds the subcommand, and turns every expected error into one line."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence

from graphrl._version import __version__
from graphrl.errors import GraphRLError

__all__ = ["main"]

COMMANDS = {
    "train": "train an agent: graphrl train ppo --env.id Pendulum-v1",
    "bench": "measure graphrl beside its peers on this machine",
    "explain": "tell what the compiler makes of an object: graphrl explain FILE:OBJECT",
    "bisect": "find the compiler pass that changes a result: graphrl bisect FILE:OBJECT --example NAME",
    "cache": "list or clear the compiled programs kept on disk",
    "export": "write a trained policy as a bundle for a robot: graphrl export RUN OUT",
    "verify": "check a bundle where it will run: graphrl verify BUNDLE",
    "inspect": "print what a bundle holds and says: graphrl inspect BUNDLE",
    "bundle-bench": "time a bundle's runtimes on this machine: graphrl bundle-bench BUNDLE --rate 50",
    "diff": "tell what differs between two bundles: graphrl diff A B",
    "replay": "run a recorded log through a bundle, to the first difference: graphrl replay BUNDLE LOG",
    "demo": "train, measure, export and run the C policy on Pendulum, in a minute or two",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0, 1 where ``diff`` or ``replay`` finds a difference or a check of
    ``export`` fails, 2 for an error of the user's making, 130 after Ctrl-C.

    ``--debug`` anywhere lets the error through with its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"graphrl {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return _fail(f"no command {name!r}; there are {', '.join(COMMANDS)}.{hint}")
    try:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # --env.id module:Id finds a module that lies here
        return importlib.import_module(f"graphrl.cli.{name.replace('-', '_')}").run(rest) or 0
    except KeyboardInterrupt as stop:
        if debug:
            raise
        print(str(stop) or "interrupted", file=sys.stderr)
        return 130
    except (GraphRLError, OSError) as error:
        if debug:
            raise
        message = re.sub(r"waive=\('(\w+)',\)", r"--waive \1", " ".join(str(error).split()))
        return _fail(message.replace("overwrite=True", "--overwrite"), 1 if message.startswith("check '") else 2)


def usage() -> str:
    """The help text of the whole command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: graphrl COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "graphrl COMMAND --help lists its options. --debug shows the traceback of an error; --version the version.",
        ]
    )


def _fail(message: str, status: int = 2) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status
