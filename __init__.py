"""Hand over to the package inside.

Python looks in a script's own folder first. For a script beside a checkout called ``graphrl``, that checkout, not the
installed package, is what ``import graphrl`` finds: so it must be the package.
"""

from pathlib import Path

_INSIDE = Path(__file__).parent / "graphrl"
__path__ = [str(_INSIDE)]
__file__ = str(_INSIDE / "__init__.py")
exec(compile((_INSIDE / "__init__.py").read_text(), __file__, "exec"))
