"""The compiler: trace a keyed graph or a training update to one program, rewrite it, lower it with a backend.

``trace.py`` and ``update.py`` make programs, ``passes/`` rewrites them, ``backends/`` runs them, ``bundle/`` ships
them.
"""

if __name__ != "graphrl.compiler":  # a second copy would register every op twice
    raise ImportError("import graphrl.compiler, not compiler")
