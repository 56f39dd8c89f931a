"""What every test shares."""

from __future__ import annotations

import os

import torch

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the suite is a CPU suite; tests that need a device are marked
torch.set_num_threads(1)  # two threads each on two cores wait for each other
