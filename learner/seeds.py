"""Every random draw of a run, derived from the run's seed and the name of what it is for.

Independent of Python's hash seed, of the order of calls and of the machine.
"""

import hashlib

SEED_LIMIT = 2**31  # fits every generator: numpy, torch, vLLM, environments


def derive_seed(run_seed: int, *key: str | int) -> int:
    """The seed of the draw named `key`, in [0, 2**31)."""
    name = "/".join(str(part) for part in (run_seed, *key))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % SEED_LIMIT
