"""Book-keeping of episodes across batches: their returns, lengths and trajectory ids."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

__all__ = ["EpisodeTracker"]


class EpisodeTracker:
    """Follows the episodes of ``num_envs`` environments; one call per batch, none per step.

    ``returns`` and ``lengths``: the last ``window`` finished episodes, oldest first.
    """

    def __init__(self, num_envs: int, window: int = 100) -> None:
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)
        self.finished = 0
        self._next_id = 0
        self._num_envs = num_envs
        self.restart()

    def restart(self) -> None:
        """Every environment starts a new episode; those in progress are dropped."""
        self._total, self._length = np.zeros(self._num_envs), np.zeros(self._num_envs, dtype=np.int64)
        self._ids = self._new_ids(self._num_envs)

    def _new_ids(self, count: int) -> np.ndarray:
        first, self._next_id = self._next_id, self._next_id + count
        return np.arange(first, self._next_id)

    def update(self, reward: Tensor, done: Tensor) -> Tensor:
        """Account for a batch: reward float ``[T, N, 1]``, done bool ``[T, N, 1]``; returns ids int64 ``[T, N]``.

        An id names one episode and is never used again; it goes on in the next batch while the episode does.
        """
        rewards, ends = reward[..., 0].numpy(), done[..., 0].numpy()
        ids = np.empty(rewards.shape, dtype=np.int64)
        start = np.zeros(self._num_envs, dtype=np.int64)
        for t, i in np.argwhere(ends):  # time first, so that new ids follow the order of the ends
            part = slice(start[i], t + 1)
            self._total[i] += rewards[part, i].sum(dtype=np.float64)
            self._length[i] += t + 1 - start[i]
            self.returns.append(float(self._total[i]))
            self.lengths.append(int(self._length[i]))
            self.finished += 1
            ids[part, i] = self._ids[i]
            self._total[i], self._length[i], start[i] = 0.0, 0, t + 1
            self._ids[i] = self._new_ids(1)[0]
        for i in range(self._num_envs):
            self._total[i] += rewards[start[i] :, i].sum(dtype=np.float64)
            self._length[i] += len(rewards) - start[i]
            ids[start[i] :, i] = self._ids[i]
        return torch.from_numpy(ids)

    def state_dict(self) -> dict[str, object]:
        """The statistics and the next id; episodes in progress are not kept."""
        return {
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "finished": self.finished,
            "next_id": self._next_id,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from :meth:`state_dict` with new episodes."""
        self.returns.clear()
        self.lengths.clear()
        self.returns.extend(state["returns"])  # type: ignore[arg-type]
        self.lengths.extend(state["lengths"])  # type: ignore[arg-type]
        self.finished, self._next_id = int(state["finished"]), int(state["next_id"])  # type: ignore[call-overload]
        self.restart()
