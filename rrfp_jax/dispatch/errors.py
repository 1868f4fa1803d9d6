"""A protocol that was not kept, by the side that broke it."""

from __future__ import annotations

from typing import final


class ProtocolError(RuntimeError):
    """An event that cannot be; the core refused it and is as it was before."""


@final
class LocalProtocolError(ProtocolError):
    """The stage's own driver broke the protocol."""


@final
class RemoteProtocolError(ProtocolError):
    """A neighbouring stage, or what claims to be one, broke the protocol."""
