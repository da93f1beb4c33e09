"""One thread for torch: tests use tiny tensors, on which a second thread only costs time."""

import torch

torch.set_num_threads(1)
