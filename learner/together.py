"""Files that ranks write and read at the same time: what one of them cannot, fails on all.

Otherwise a rank that failed and one that did not would wait in different exchanges.
"""

import os
import re
from collections.abc import Callable, Sequence
from errno import EIO
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from capo.learner.ranks import Ranks
from capo.protocol.errors import ConfigError

T = TypeVar("T")


def write_together(writes: Sequence[Callable[[], None]], folder: Path, ranks: Ranks) -> None:
    """Call all `writes`, which go to `folder`, whichever of them fail: they may gather from ranks.

    Raises OSError on all ranks if one of them could not write.
    """
    failures = [failure for write in writes if (failure := _tried(write))]
    worst = ranks.largest((failures[0].errno or EIO) if failures else 0)
    if failures:
        raise failures[0]
    if worst:
        raise OSError(worst, f"another rank could not write ({os.strerror(worst)})", folder)


def load_together(load: Callable[[], T], folder: Path, ranks: Ranks) -> T:
    """What `load` gives, which needs no other rank.

    Raises ConfigError, OSError or ValueError, as `load` does, on all ranks if one could not load
    what is in `folder`.
    """
    failure: Exception | None = None
    try:
        loaded = load()
    except (ConfigError, OSError, ValueError) as error:
        failure = error
    failed = ranks.largest(int(failure is not None))
    if failure:
        raise failure
    if failed:
        raise ConfigError(f"another rank could not load the model {folder}")
    return loaded


def _tried(write: Callable[[], None]) -> OSError | None:
    try:
        write()
    except OSError as error:
        return error
    except SafetensorError as error:  # the system's number is only in its text
        number = re.search(r"\(os error (\d+)\)", str(error))
        return OSError(int(number[1]) if number else EIO, str(error))
    return None
