"""A replay buffer that looks more often.

verl's asks every two seconds whether the batch is complete. On a GPU that is nothing beside a step; a tiny model on a
CPU takes a step in less than one. Chosen by ``trainer.v1.sampler.custom_sampler``, verl's extension point.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_SECONDS = 0.05


class QuickReplayBuffer(ReplayBuffer):
    """verl's replay buffer for the synchronous trainer, polled every 50 ms."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **kwargs)


class QuickReplayBufferAsync(ReplayBufferAsync):
    """verl's replay buffer for the asynchronous trainers, polled every 50 ms."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **kwargs)
