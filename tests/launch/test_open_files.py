"""A learner begins with as many open files as it may have."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from capo.launch.open_files import allow_many_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
allow_many_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "after"), [(64, 512, "512 512"), (512, 512, "512 512"), (100, 100, "100 100")]
)
def test_the_limit_is_raised_to_what_is_allowed(soft: int, hard: int, after: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(soft), str(hard)], capture_output=True, text=True
    )
    assert ended.stdout.strip() == after, ended.stderr
