"""C99 generator: a program's operations become plain loops with constant trip counts.

``emit.py`` walks the program, ``ops.py`` says how each operation reads in C, ``layout.py`` places the scratch memory.
"""

from graphrl.compiler.backends.c99.emit import Generated, generate
from graphrl.compiler.backends.c99.nodes import Unsupported

__all__ = ["Generated", "Unsupported", "generate"]
