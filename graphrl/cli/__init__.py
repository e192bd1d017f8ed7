"""The ``graphrl`` command. One file a subcommand; each is imported when it is called, so help is quick.

What a command does lives in the library; a file here reads options and prints.
"""

from graphrl.cli.app import main

__all__ = ["main"]
