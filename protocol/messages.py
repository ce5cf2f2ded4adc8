"""The messages of the wire, by direction. What is done with them is `exchange` and `conversation`.

Every message is a tagged Struct; `ToLearner` and `ToActor` are the unions that a side accepts.
"""

from msgspec import Struct

from capo.protocol.records import EpisodeEnd, FloatArray, IntArray, Lease, Step, TensorSpec

PROTOCOL_VERSION = 1


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a connection, sent again after every reconnect."""

    protocol_version: int
    actor_id: str  # one per actor process: survives reconnects, not restarts
    actor_name: str  # for people: host and pid, or what the user chose
    run_id: str = ""  # the run this actor already works for; "" on first contact
    tokenizer_digest: str = ""  # the tokenizer this actor already uses; "" = take the learner's
    capacity: int = 1  # episodes it can play at once
    transports: tuple[str, ...] = ()  # weight transports it can use, best first: "nccl", "gloo"
    held_leases: tuple[str, ...] = ()  # episode ids it is still playing
    weights_version: int = -1  # policy version in its engine; -1 = none yet


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """The engine is up and can join a weight group."""

    weights_version: int = -1


class Delivery(Struct, frozen=True, kw_only=True, tag=True):
    """Records in order. `sequence` counts deliveries of this actor from 1 without gaps."""

    sequence: int
    steps: tuple[Step, ...] = ()
    ends: tuple[EpisodeEnd, ...] = ()


class ActorHeartbeat(Struct, frozen=True, kw_only=True, tag=True):
    """What this actor does at present. Sent every `Welcome.heartbeat_s` seconds."""

    running: int = 0  # episodes being played
    waiting_for: str = ""  # what this actor waits for, for `capo status`
    ready: bool = False  # the engine is up, in case Ready got lost
    held_leases: tuple[str, ...] | None = None  # as in Hello, in case a Grant got lost
    metrics: dict[str, float] = {}


class GroupAccept(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to GroupInvite: this actor can join the weight group of `epoch`."""

    epoch: int
    workers: int = 1  # ranks this actor takes in the group: one per worker of its engine


class GroupFormed(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to GroupForm, once this actor has joined or could not."""

    epoch: int
    error: str = ""  # why it could not join, "" = it did
    reached: bool = True  # False: the error is that this actor could not reach the learner's store


class WeightsReport(Struct, frozen=True, kw_only=True, tag=True):
    """The outcome of one broadcast in one engine."""

    epoch: int
    version: int
    error: str = ""  # "" = the engine has the weights and the probe agrees
    broke_off: bool = False  # the error is the transfer's: the engine can join the next group
    checksum: str = ""  # of the bytes received
    probe_logprobs: FloatArray | None = None  # float32 [len(probe) - 1]
    pause_s: float = 0.0  # how long generation stood still


class Goodbye(Struct, frozen=True, kw_only=True, tag=True):
    """This actor leaves; it plays nothing more, and everything it had was acked."""

    reason: str


class StatusRequest(Struct, frozen=True, kw_only=True, tag=True):
    """Who waits for whom? Anyone who may connect may ask, without a Hello."""


class ActorSetup(Struct, frozen=True, kw_only=True):
    """Everything an actor needs that it did not bring itself."""

    environment: str  # "module:factory"
    environment_options: bytes  # JSON
    rollout: bytes  # JSON of configs.schema.RolloutConfig
    model_config: bytes  # the model's config.json
    model_dtype: str
    max_length: int
    tokenizer_files: dict[str, bytes]
    tokenizer_digest: str
    seed: int
    enable_thinking: bool = False  # passed to the chat template


class Welcome(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to Hello: this actor may work, and where its deliveries stand."""

    run_id: str
    learner_name: str
    last_sequence: int  # the last delivery of this actor that is committed
    window: int  # deliveries that may be unacked at once
    heartbeat_s: float  # how often either side sends a heartbeat
    dead_after_s: float  # after this long a silence the other side is given up
    max_message_bytes: int = 64 << 20  # a larger message is refused; filled in by the server
    setup: ActorSetup | None  # None when the actor already has it (same run, same digest)


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    """The learner will not work with this actor. `reason` says why and what to do."""

    reason: str


class Reintroduce(Struct, frozen=True, kw_only=True, tag=True):
    """The learner does not know this connection (one of the two came back): say Hello again."""


class Grant(Struct, frozen=True, kw_only=True, tag=True):
    """Play these. A lease that comes twice is played once."""

    leases: tuple[Lease, ...]


class Revoke(Struct, frozen=True, kw_only=True, tag=True):
    """Stop playing these episodes; their records are no longer wanted."""

    episode_ids: tuple[str, ...]
    reason: str


class Ack(Struct, frozen=True, kw_only=True, tag=True):
    """Deliveries are durable and need not be sent again."""

    sequence: int  # all deliveries up to here are committed


class LearnerHeartbeat(Struct, frozen=True, kw_only=True, tag=True):
    """What the learner does at present. Sent every `Welcome.heartbeat_s` seconds."""

    policy_version: int = 0
    paused: str = ""  # why no leases come at present, "" = not paused


class GroupInvite(Struct, frozen=True, kw_only=True, tag=True):
    """A weight group will be formed; answer GroupAccept at once if you can join."""

    epoch: int


class GroupForm(Struct, frozen=True, kw_only=True, tag=True):
    """Join the weight group of `epoch` within `timeout_s`; answer GroupFormed."""

    epoch: int
    transport: str  # "gloo" or "nccl"
    host: str
    port: int
    rank: int  # this actor's first; the learner is 0
    world_size: int
    timeout_s: float


class UpdateWeights(Struct, frozen=True, kw_only=True, tag=True):
    """Pause, receive, check, resume. Answer with WeightsReport."""

    epoch: int
    version: int
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    checksum: str
    probe: IntArray  # int32 [n] token ids
    probe_logprobs: FloatArray  # float32 [n - 1], the learner's own
    probe_tolerance: float
    timeout_s: float


class StatusReport(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to StatusRequest."""

    status: bytes  # JSON of learner.status_file.LearnerStatus


class Drain(Struct, frozen=True, kw_only=True, tag=True):
    """Finish what you play, deliver it, say Goodbye. `abort`: drop what you play instead."""

    reason: str
    abort: bool = False


ToLearner = (
    Hello
    | Ready
    | Delivery
    | ActorHeartbeat
    | GroupAccept
    | GroupFormed
    | WeightsReport
    | Goodbye
    | StatusRequest
)
ToActor = (
    Welcome
    | Refused
    | Reintroduce
    | Grant
    | Revoke
    | Ack
    | LearnerHeartbeat
    | GroupInvite
    | GroupForm
    | UpdateWeights
    | StatusReport
    | Drain
)
