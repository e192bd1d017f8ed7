"""Making a raw Gymnasium environment, with errors that say what to type instead."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from graphrl.errors import EnvError, MissingExtraError, require_extra

__all__ = ["make_raw"]

EXTRAS = {"mujoco": "graphrl[mujoco]", "classic_control": "graphrl[demo]", "box2d": "gymnasium[box2d]"}


def make_raw(env: str | Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """One ``gymnasium.Env`` from an id or a constructor.

    The passive checker is left out unless ``disable_env_checker=False``: it looks at the first step only, which
    :func:`check_env_specs` does better. Raises :class:`EnvError` for an unknown id or an object that is no single
    environment, :class:`MissingExtraError` when its simulator is not installed.
    """
    require_extra("gymnasium", "demo")
    import gymnasium

    if isinstance(env, str):
        made = _make_id(env, {"disable_env_checker": True, **kwargs})
    elif isinstance(env, gymnasium.Env):
        raise EnvError(f"GymEnv makes its own environments: pass a constructor such as lambda: {env}, not {env}")
    elif callable(env):
        made = env(**kwargs)
    else:
        raise EnvError(f"{env!r} is a {type(env).__name__}; expected an environment id or a constructor")
    if not isinstance(made, gymnasium.Env):
        raise EnvError(
            f"the constructor returned a {type(made).__name__}, not a gymnasium.Env."
            " For several environments pass the constructor of one and num_envs="
        )
    _refuse_autoreset(made)
    return made


def _make_id(env_id: str, kwargs: dict[str, Any]) -> Any:
    import gymnasium
    from gymnasium import error

    module, _, name = env_id.rpartition(":")
    if module:
        _import_module(module, env_id)
    try:
        return gymnasium.make(env_id, **kwargs)
    except error.DependencyNotInstalled as exc:
        entry = str(getattr(gymnasium.registry.get(name), "entry_point", ""))
        extra = next((pip for family, pip in EXTRAS.items() if family in entry), None)
        command = f"run  pip install '{extra}'" if extra else f"gymnasium says: {exc}"
        raise MissingExtraError(f"{env_id} needs a package that is not installed: {command}") from exc
    except (error.UnregisteredEnv, error.DeprecatedEnv) as exc:
        near = difflib.get_close_matches(name, list(gymnasium.registry), n=3, cutoff=0.5)
        near = [f"{module}:{known}" for known in near] if module else near
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else f" gymnasium says: {exc}"
        raise EnvError(f"no environment {env_id!r} is registered.{hint}") from exc
    except error.Error as exc:
        raise EnvError(f"gymnasium cannot make {env_id!r}: {exc}") from exc


def _import_module(module: str, env_id: str) -> None:
    """Run the module that registers an environment; whatever it raises becomes an :class:`EnvError`."""
    try:
        importlib.import_module(module)
    except Exception as exc:
        raise EnvError(
            f"the module {module!r} of {env_id!r} cannot be imported: {type(exc).__name__}: {exc}."
            " It must lie in the current directory or on the Python path"
        ) from exc


def _refuse_autoreset(env: Any) -> None:
    from gymnasium.wrappers import Autoreset

    layer = env
    while layer is not layer.unwrapped:
        if isinstance(layer, Autoreset):
            raise EnvError("the Autoreset wrapper inserts a dummy step after each episode: remove it, GymEnv resets")
        layer = layer.env
