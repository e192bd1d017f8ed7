"""Benchmarks of graphrl beside its peers, one file a suite; ``graphrl bench`` runs them.

A suite is a function ``suite(options)`` that gives tables, whose competitors all take turns in one run.
"""

from graphrl.bench.run import SUITES, run_suites
from graphrl.bench.tables import BenchOptions, to_markdown

__all__ = ["SUITES", "BenchOptions", "run_suites", "to_markdown"]
