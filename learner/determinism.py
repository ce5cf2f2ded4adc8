"""The same numbers every time, on the same kind of machine: what replay's bit-for-bit rests on."""

import os

import torch


def make_deterministic(seed: int) -> None:
    """Sets torch's process-wide switches; call it before the first computation.

    On CPUs one thread computes, because a sum's rounding depends on how it is split over threads.
    Operations without a deterministic implementation warn instead of failing.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every new tensor with NaN is for finding bugs, and slow.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    torch.manual_seed(seed)
