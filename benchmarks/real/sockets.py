"""Each run's weights travel through a socket of its own, also on GPUs: loaded by `VERL_USE_EXTERNAL_MODULES`.

verl names the socket by Ray's job, whose number is the same in every cluster that a run starts for itself: of two runs at once
one would get the other's weights.
"""

import wrapt

from verl_cpu.vllm_worker import receive_through_private_socket, send_through_private_socket

PLACE = "verl.workers.rollout.vllm_rollout"

wrapt.register_post_import_hook(send_through_private_socket, f"{PLACE}.vllm_rollout")
wrapt.register_post_import_hook(receive_through_private_socket, f"{PLACE}.utils")
