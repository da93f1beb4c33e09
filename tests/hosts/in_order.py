"""verl's replay buffers with batches in the order of the data.

verl orders prompts by hashes of random names. Its `trainer.v1.sampler.custom_sampler` selects these buffers.
"""

from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_cpu.sampler import QuickReplayBuffer, QuickReplayBufferAsync

PATH = f"pkg://{__name__}"


def _prompt(key: str) -> str:
    return key.split("_")[0]


class _InOrder(ReplayBuffer):
    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, int]]:
        _, snapshot, step_of = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        as_registered = [uid for uid in step_of if uid in sampleable_keys]
        return sorted(as_registered, key=step_of.__getitem__)[:batch_size], snapshot, step_of

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict[str, Any]]
    ) -> KVBatchMeta:
        place = {uid: number for number, uid in enumerate(selected_prompt_uids)}
        keys = [key for key in partition_snapshot if _prompt(key) in place]
        keys.sort(key=lambda key: (place[_prompt(key)], *map(int, key.split("_")[1:])))
        snapshot = {key: partition_snapshot[key] for key in keys}
        return super()._materialize_batch(partition_id, selected_prompt_uids, snapshot)


class InOrder(_InOrder, QuickReplayBuffer):
    pass


class InOrderAsync(_InOrder, QuickReplayBufferAsync):
    pass
