"""Quiets a learner's libraries, so that people can read its output; called before they load."""

import os
import warnings


def prepare() -> None:
    """One thread per process unless the user says otherwise; no progress bars and no chatter."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the libraries
        from transformers.utils import logging

    logging.disable_progress_bar()
