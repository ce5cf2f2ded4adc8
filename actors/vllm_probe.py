"""The probe of a broadcast in a running vLLM: ask for its log-probs, compare with the learner's."""

import numpy as np

from capo.actors.vllm_core import VllmCore
from capo.protocol.messages import UpdateWeights
from capo.protocol.records import FloatArray, IntArray


async def prompt_logprobs(core: VllmCore, tokens: IntArray) -> FloatArray:
    """float32 [len(tokens) - 1] under the weights in the engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    result = await core.final(tokens, parameters)
    return np.asarray(result.prompt_logprobs.logprobs, dtype=np.float32)


def probe_complaint(logprobs: FloatArray, update: UpdateWeights) -> str:
    """One sentence if the engine's log-probs of the probe are not the learner's, else ""."""
    if logprobs.shape != update.probe_logprobs.shape:
        return (
            f"the probe gave {len(logprobs)} log-probs, "
            f"the learner has {len(update.probe_logprobs)}"
        )
    if len(logprobs) == 0:
        return ""
    gap = np.abs(logprobs - update.probe_logprobs)
    worst = float(gap.max())
    if worst <= update.probe_tolerance:  # false for NaN
        return ""
    return (
        f"after the broadcast of version {update.version} this engine's log-probs of the probe are "
        f"off by {worst:.3g} nats (at most {update.probe_tolerance:g} are allowed): it does not "
        "have the learner's weights and stops sampling"
    )
