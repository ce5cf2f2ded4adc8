"""One message of every type, with no field at its default, and its stored bytes.

`golden_frames.json` has one hex string for each frame. When messages change on purpose, write it
again with `python -m tests.protocol.examples`, look at the difference, and ask whether
PROTOCOL_VERSION has to change.
"""

import json
from pathlib import Path

import numpy as np

from capo.protocol import messages as m
from capo.protocol import records as r
from capo.protocol.frames import encode

INT = np.array([1, 2, 65536], np.int32)
FLOAT = np.array([-0.5, -1.25], np.float32)
SETUP = m.ActorSetup(
    environment="envs.x:make",
    environment_options=b"{}",
    rollout=b"{}",
    model_config=b"{}",
    model_dtype="float32",
    max_length=64,
    tokenizer_files={"t.json": b"\x00\xff"},
    tokenizer_digest="d",
    seed=3,
    enable_thinking=True,
)
STEP = r.Step(
    episode_id="e.0",
    index=1,
    keep=2,
    observation=INT,
    action=np.array([7, 8], np.int32),
    behaviour_logprobs=FLOAT,
    versions=(r.VersionSpan(3, 1), r.VersionSpan(4, 1)),
    reward=0.5,
    entropies=FLOAT,
    state_key="s",
    info={"i": 1.0},
)
END = r.EpisodeEnd(
    episode_id="e.0",
    status=r.EpisodeStatus.TRUNCATED,
    num_steps=2,
    outcome=0.25,
    final_keep=1,
    final_observation=INT,
    metrics={"m": 2.0},
    error="x",
)
LEASE = r.Lease(
    lease_id="l",
    attempt=1,
    task=r.Task(id="t", payload=b"p"),
    group_id="g",
    member=2,
    purpose=r.Purpose.TRAIN,
    seed=9,
    policy_version=5,
)
EXAMPLES = {
    type(message): message
    for message in (
        m.Hello(
            protocol_version=1,
            actor_id="a",
            actor_name="n",
            run_id="r",
            tokenizer_digest="d",
            capacity=4,
            transports=("gloo",),
            held_leases=("e.0",),
            weights_version=2,
        ),
        m.Ready(weights_version=2),
        m.Delivery(sequence=7, steps=(STEP,), ends=(END,)),
        m.ActorHeartbeat(
            running=1, waiting_for="w", ready=True, held_leases=("l.1",), metrics={"t": 1.5}
        ),
        m.GroupAccept(epoch=1, workers=2),
        m.GroupFormed(epoch=1, error="e", reached=False),
        m.WeightsReport(
            epoch=1,
            version=2,
            error="e",
            broke_off=True,
            checksum="c",
            probe_logprobs=FLOAT,
            pause_s=0.5,
        ),
        m.Goodbye(reason="done"),
        m.Welcome(
            run_id="r",
            learner_name="l",
            last_sequence=3,
            window=64,
            heartbeat_s=1.0,
            dead_after_s=15.0,
            max_message_bytes=1000,
            setup=SETUP,
        ),
        m.Refused(reason="no"),
        m.Reintroduce(),
        m.Grant(leases=(LEASE,)),
        m.Revoke(episode_ids=("e.0",), reason="old"),
        m.Ack(sequence=3),
        m.LearnerHeartbeat(policy_version=4, paused="p"),
        m.GroupInvite(epoch=1),
        m.GroupForm(
            epoch=1, transport="gloo", host="h", port=1, rank=1, world_size=2, timeout_s=3.0
        ),
        m.UpdateWeights(
            epoch=1,
            version=2,
            tensors=(r.TensorSpec("w", "float32", (2, 3)),),
            bucket_bytes=64,
            checksum="c",
            probe=INT,
            probe_logprobs=FLOAT,
            probe_tolerance=0.5,
            timeout_s=3.0,
        ),
        m.StatusRequest(),
        m.StatusReport(status=b"{}"),
        m.Drain(reason="end", abort=True),
    )
}

GOLDEN_FILE = Path(__file__).with_name("golden_frames.json")
STORED: dict[str, list[str]] = json.loads(GOLDEN_FILE.read_text()) if GOLDEN_FILE.exists() else {}


if __name__ == "__main__":
    frames = {
        kind.__name__: [bytes(frame).hex() for frame in encode(message)]
        for kind, message in EXAMPLES.items()
    }
    GOLDEN_FILE.write_text(json.dumps(frames, indent=1) + "\n")
