"""A checkpoint's policy folder in vLLM, as it is: its log-probs are the trainer's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from capo.configs.schema import TinyModelConfig
from capo.learner.tiny_model import build_policy, build_tokenizer
from tests.factories import run_config

SCRIPT = """
import json, sys
import numpy as np

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
              max_model_len=64, kv_cache_memory_bytes=2**27)
    tokens = json.loads(sys.argv[2])
    (output,) = llm.generate([{"prompt_token_ids": tokens}],
                             SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))
    rows = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    print("LOGPROBS", json.dumps([row[token].logprob for token, row in rows]))
"""


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.mark.slow
def test_vllm_loads_an_exported_policy_as_it_is(tmp_path: Path) -> None:
    from capo.learner.trainer import Trainer

    start = tmp_path / "start"
    tokenizer = build_tokenizer(["go", "take"], start)
    build_policy(TinyModelConfig(), tokenizer, max_length=64, seed=0, folder=start)
    trainer = Trainer(run_config(), start)
    trainer.save(tmp_path / "checkpoint")
    tokens = np.random.default_rng(0).integers(0, trainer.vocabulary_size, 24).tolist()
    script = tmp_path / "in_vllm.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "checkpoint" / "policy"), json.dumps(tokens)],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")]
    given = np.array(json.loads(line.removeprefix("LOGPROBS ")))
    np.testing.assert_allclose(given, trainer.logprobs(tokens).numpy(), atol=1e-4)
