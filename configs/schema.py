"""What a run's TOML file may say. One Struct per table; unknown keys are refused by `load`.

Defaults are the paper's where it gives one (arXiv 2604.18401, section 4.1 and table 7).
The algorithm's table lives in `algorithms`.
"""

from typing import Any, Literal

from msgspec import Struct

from capo.configs.algorithms import AlgorithmConfig


class EnvironmentConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`factory` is `module:name` of an EnvFactory maker; `options` are handed to it."""

    factory: str
    options: dict[str, Any] = {}


class TinyModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A small Qwen3 built from scratch, with a tokenizer of the environment's own words."""

    hidden_size: int = 64
    num_layers: int = 3
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    intermediate_size: int = 192


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The policy. Exactly one of `path` (a Hugging Face folder) and `tiny`."""

    path: str = ""  # a Hugging Face folder, or a name on its hub
    tiny: TinyModelConfig | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_length: int = 8192  # tokens of one full sequence: prompt and action
    critic_path: str = ""  # where the critic's backbone starts; "" = the policy's weights
    enable_thinking: bool = False  # passed to the chat template


class WarmStartConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Behaviour cloning of the environment's own demonstrations before the first update."""

    demonstrations: int = 3000  # episodes
    steps: int = 250
    batch_episodes: int = 24
    lr: float = 3e-3  # of embeddings, head and norms (AdamW)
    matrix_lr: float = 0.02  # of the layers' matrices (Muon)
    warmup_steps: int = 30
    final_lr_factor: float = 0.1


class RolloutConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an actor plays. It travels to the actors in the handshake."""

    temperature: float = 1.0  # of sampling; log-probs are taken at it
    max_action_tokens: int = 4096  # then the action is cut
    concurrency: int = 64  # episodes at once per actor
    on_overlong: Literal["end", "drop_oldest"] = "end"  # a prompt that leaves no room for an action
    env_timeout_s: float = 60.0  # one reset or step
    engine_timeout_s: float = 600.0  # one action, or one order to the engine
    record_entropy: bool = False
    gpu_memory_utilization: float = 0.85
    kv_cache_gib: float = 1.0  # on CPUs
    tensor_parallel_size: int = 1
    enforce_eager: bool = False


class LearnerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One update. A batch is `batch_episodes` episodes, cut into `minibatches` optimizer steps."""

    batch_episodes: int = 128
    minibatches: int = 4
    epochs: int = 1  # over the same batch
    token_budget: int = 16384  # tokens of one microbatch
    policy_lr: float = 1e-6  # of AdamW
    policy_warmup_steps: int = 0  # minibatch steps
    policy_final_lr_factor: float = 1.0  # linear to this factor at the last update
    critic_lr: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0 = no clipping
    ranks: int = 1  # data-parallel processes; on GPUs each has one of its own
    zero_stage: Literal[0, 1, 2, 3] = 0  # what ranks share out: 1 moments, 2 gradients, 3 weights
    gradient_checkpointing: bool = False


class SchedulerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who plays what, and how old it may be. `max_staleness` 0 is a synchronous run. A group is
    flat when the returns of its members are all the same."""

    max_staleness: int = 1  # policy versions; 0 = synchronous
    group_size: int = 0  # episodes of one task that belong together; 0 = 8 if the method needs it
    max_flat_batches: int = -1  # of flat groups, replaced for one update; -1 = 10 for dapo, else 0
    max_attempts: int = 3  # times one lease is played before it is given up and counted
    max_error_fraction: float = 0.5  # of the last `error_window` episodes, then the run stops
    error_window: int = 256


class WeightSyncConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    transport: Literal["auto", "gloo", "nccl"] = "auto"
    bucket_mib: int = 32
    join_timeout_s: float = 20.0
    transfer_timeout_s: float = 120.0
    probe_tokens: int = 48
    probe_tolerance: float = 0.0  # nats; 0 = by dtype: 1e-3 in float32, 0.15 in bfloat16


class CheckpointConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    every: int = 25  # updates
    keep_last: int = 3


class EvaluationConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    split: Literal["valid", "test"] = "valid"
    games: int = 200  # of the split, always the same
    before: bool = True
    after: bool = True
    every: int = 0  # updates; 0 = never in between
    modes: tuple[Literal["sampled", "greedy"], ...] = ("sampled", "greedy")


class NetworkConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the learner listens. Anything but loopback needs keys, or `insecure`."""

    bind: str = "tcp://127.0.0.1:0"  # port 0 = any free one
    weights_host: str = "127.0.0.1"  # where actors reach the weight group's store
    heartbeat_s: float = 1.0
    dead_after_s: float = 15.0
    window: int = 64  # deliveries an actor may have unacked
    max_message_mib: int = 64
    key_file: str = ""
    insecure: bool = False


class RunConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole run."""

    name: str  # in folders and reports
    seed: int = 0  # of every random draw of the run
    run_dir: str = ""  # "" = runs/NAME-seedSEED-TIME
    updates: int = 1000  # batches to train on
    environment: EnvironmentConfig
    model: ModelConfig
    warm_start: WarmStartConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    network: NetworkConfig = NetworkConfig()
    actors: int = 1  # how many `capo run` starts on this machine
