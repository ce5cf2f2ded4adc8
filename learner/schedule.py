"""The policy's learning rate at a given optimizer step. Pure arithmetic."""


def learning_rate(
    step: int, *, base: float, warmup_steps: int, total_steps: int, final_factor: float
) -> float:
    """Linear from 0 over `warmup_steps`, times linear from 1 to `final_factor` at the last step.

    `step` counts optimizer steps from 0, of `total_steps`; later ones keep the last rate. The
    first step is not wasted on a rate of 0: step s of the warm-up has (s + 1) / warmup_steps.
    """
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0
    progress = min(1.0, step / (total_steps - 1)) if total_steps > 1 else 0.0
    return base * warmup * (1.0 + (final_factor - 1.0) * progress)
