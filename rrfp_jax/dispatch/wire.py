"""The notes between members of a stage group, as bytes."""

from __future__ import annotations

import msgspec

from rrfp_jax.dispatch.notes import Decision, Note, Proposal, Ready
from rrfp_jax.task import Payload, Task


class NoteHeader(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A note and whom it concerns.

    Attributes:
      epoch: The step that it belongs to, by count.
      replica: Of the stage group.
      stage: The same.
      kind: The name of the note's class.
      numbers: Its integers, in the order in which the class has them.
      what: Its task or payload.
    """

    epoch: int
    replica: int
    stage: int
    kind: str
    numbers: tuple[int, ...]
    what: str

    @property
    def note(self) -> Note:
        """The note itself."""
        match self.kind, self.numbers:
            case "Ready", (member, microbatch):
                payload = Payload(self.what)
                return Ready(member=member, payload=payload, microbatch=microbatch)
            case "Decision", (number,):
                return Decision(number=number, task=Task.parse(self.what))
            case "Proposal", (member, round_):
                return Proposal(member=member, round=round_, task=Task.parse(self.what))
        raise ValueError(f"expected a note, got {self.kind!r} with {self.numbers}.")


read_note = msgspec.msgpack.Decoder(NoteHeader).decode
_write = msgspec.msgpack.Encoder().encode


def write_note(epoch: int, replica: int, stage: int, note: Note) -> bytes:
    """A note as bytes; `read_note` reads them."""
    numbers: tuple[int, ...]
    match note:
        case Ready(member=member, payload=payload, microbatch=microbatch):
            numbers, what = (member, microbatch), payload.value
        case Decision(number=number, task=task):
            numbers, what = (number,), str(task)
        case Proposal(member=member, round=round_, task=task):
            numbers, what = (member, round_), str(task)
    return _write(
        NoteHeader(
            epoch=epoch,
            replica=replica,
            stage=stage,
            kind=type(note).__name__,
            numbers=numbers,
            what=what,
        )
    )


def targets(note: Note, member: int, num_members: int) -> list[int]:
    """The members that a note is for: the leader alone, or all others."""
    everyone = range(1) if isinstance(note, Ready) else range(num_members)
    return [other for other in everyone if other != member]
