"""verl's replay buffers, polled every 50 ms.

verl asks every two seconds whether the batch is complete; a step of a tiny model on a CPU takes less than one. The key
``trainer.v1.sampler.custom_sampler``, an extension point of verl, selects them.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_SECONDS = 0.05


class QuickReplayBuffer(ReplayBuffer):
    """The replay buffer of the synchronous trainer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **kwargs)


class QuickReplayBufferAsync(ReplayBufferAsync):
    """The replay buffer of the asynchronous trainers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(poll_interval=POLL_SECONDS, **kwargs)
