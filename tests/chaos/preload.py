"""What learners and actors import, imported once: see `forked`."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401
    from transformers import AutoTokenizer, Qwen3ForCausalLM  # noqa: F401

    import capo.actors.worker
    import capo.launch.assemble
    import capo.launch.learner
    import capo.launch.outcome
    import capo.launch.run
    import capo.learner.loop  # noqa: F401
    import tests.chaos.scripted_actor
    import tests.chaos.world  # noqa: F401
