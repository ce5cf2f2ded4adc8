"""Every error of this project that somebody catches.

CapoError
├── ConfigError          a configuration that cannot run; says which key and what to do
├── ProtocolError        a frame or message that breaks the wire's contract; its sender is refused
├── RefusedError         the other side refused this one (version, tokenizer, run, key)
├── PeerLostError        a peer did not answer within a time limit; names the peer and the phase
├── RankLostError        a rank of the learner is gone; a resume repeats the update it was in
├── RunFileError         a run file that cannot be opened, read or written
│   └── StorageFullError  no room on the disk; what was committed is safe, and it goes on with room
├── CheckpointError      a checkpoint that is torn, missing or of another run
├── WeightSyncError      a broadcast that failed, or an engine whose weights are not the learner's
├── EngineError          the inference engine died or returned something unusable
└── EnvError             an environment raised, hung, or returned something unusable

ValueError stays the error of a wrong argument; assert that of the impossible.
"""


class CapoError(Exception):
    """Base of the errors a caller may want to catch. Its text is one sentence for the user."""


class ConfigError(CapoError):
    pass


class ProtocolError(CapoError):
    pass


class RefusedError(CapoError):
    pass


class PeerLostError(CapoError):
    pass


class RankLostError(CapoError):
    pass


class RunFileError(CapoError):
    pass


class StorageFullError(RunFileError):
    pass


class CheckpointError(CapoError):
    pass


class WeightSyncError(CapoError):
    pass


class EngineError(CapoError):
    pass


class EnvError(CapoError):
    pass


def first_of(group: BaseExceptionGroup[CapoError]) -> CapoError:
    """The error that a group began with, however deep it lies."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, CapoError)
    return error
