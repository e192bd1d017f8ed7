"""Reinforcement learning as keyed graphs."""

from graphrl._version import __version__ as __version__
