"""The sockets of a process: whom they let in, and where the others listen.

Every process has an inbox (a ROUTER socket) and, for each other process, an outbox (a
DEALER socket that is connected to that one's inbox). With ``curve`` each makes a key pair
for this one start; only the job's public keys are let in, so a stranger does not get as
far as a message. In either mode process 0 makes a token, a secret that every message
carries. Addresses, public keys and the token are exchanged through the job's store.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import msgspec
import zmq
import zmq.auth.thread

from rrfp_jax.job.errors import JobError
from rrfp_jax.job.peer import Peer, watched
from rrfp_jax.job.store import Store

# Long arrays are sent in pieces: large enough for the full rate, small enough that what is
# behind them waits for a moment only.
PIECE_BYTES = 1 << 20
# Of one buffer. A peer that announces more is cut off before anything is allocated.
LARGEST_BUFFER_BYTES = 64 << 20
_LARGEST_FRAME_BYTES = LARGEST_BUFFER_BYTES + (1 << 20)
# Messages to one process that it has not taken. A step's budget allows far fewer.
MOST_WAITING = 100_000
_LINGER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PostOptions:
    """How processes talk.

    Attributes:
      security: ``curve`` encrypts and authenticates, ``none`` does neither.
      peer_timeout_s: A process that is not heard of for so long is lost.
      start_timeout_s: How long to wait for every process to be there.
    """

    security: Literal["curve", "none"] = "curve"
    peer_timeout_s: float = 20.0
    start_timeout_s: float = 120.0


class _Address(msgspec.Struct, array_like=True, frozen=True):
    """Where a process listens, and its public key."""

    endpoint: str
    public_key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sockets:
    """All of one process.

    Attributes:
      inbox: Bound; for the messages of all others.
      at_the_door: Monitors the inbox for those who are not let in.
      peers: The other processes by their indices.
      token: The job's secret.
    """

    inbox: zmq.Socket[bytes]
    at_the_door: zmq.Socket[bytes]
    peers: Mapping[int, Peer]
    token: bytes
    context: zmq.Context[Any]
    guard: zmq.auth.thread.ThreadAuthenticator | None

    def close(self, staying: Sequence[Peer]) -> None:
        """Closes all.

        Args:
          staying: Those that may still take what was sent to them.
        """
        if self.guard is not None:
            self.guard.stop()
        for peer in self.peers.values():
            peer.close(_LINGER_S if peer in staying else 0.0)
        self.inbox.disable_monitor()
        self.at_the_door.close(linger=0)
        self.inbox.close(linger=0)
        self.context.term()


def open_sockets(
    process_index: int, num_processes: int, host: str, store: Store, options: PostOptions
) -> Sockets:
    """Starts to listen, finds the others and begins to connect to them.

    Args:
      process_index: Of this process.
      num_processes: Of the job.
      host: The address of this process at which the others reach it.
      store: Where addresses, keys and the token are exchanged.
      options: How to talk.

    Raises:
      JobError: An address cannot be had, or a process did not say its own in time.
    """
    deadline_s = time.monotonic() + options.start_timeout_s
    keys = zmq.curve_keypair() if options.security == "curve" else None
    context: zmq.Context[Any] = zmq.Context(io_threads=2)
    guard = None
    if keys is not None:
        # Whom to let in is known before there is a port to come to.
        guard = _guard(
            context, _exchange_keys(process_index, num_processes, keys[0], store, deadline_s)
        )
    inbox = _socket(context, zmq.ROUTER, host, keys)
    inbox.curve_server = keys is not None
    door = inbox.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )
    port = inbox.bind_to_random_port(f"tcp://{host}")
    own = _Address(f"tcp://{host}:{port}", keys[0] if keys else b"")
    store.set(f"post/{process_index}", msgspec.msgpack.encode(own))
    if process_index == 0:
        store.set("post/token", secrets.token_bytes(16))
    peers = {}
    for index, address in _find_others(process_index, num_processes, store, deadline_s).items():
        outbox = _socket(context, zmq.DEALER, host, keys)
        if keys is not None:
            outbox.curve_serverkey = address.public_key
        watched(outbox, options.peer_timeout_s)
        peers[index] = Peer(index, outbox, options.peer_timeout_s)
        outbox.connect(address.endpoint)
    return Sockets(
        inbox=inbox,
        at_the_door=door,
        peers=peers,
        token=store.get("post/token", _left_s(deadline_s)),
        context=context,
        guard=guard,
    )


def in_words(indices: Sequence[int]) -> str:
    """``process 3``, or ``processes 1, 2``."""
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _socket(
    context: zmq.Context[Any], kind: int, host: str, keys: tuple[bytes, bytes] | None
) -> zmq.Socket[bytes]:
    """A socket with limits to what it holds and takes, and with this process's keys."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = MOST_WAITING
    socket.ipv6 = host.startswith("[")
    socket.maxmsgsize = _LARGEST_FRAME_BYTES
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys
    return socket


def _exchange_keys(
    process_index: int, num_processes: int, own: bytes, store: Store, deadline_s: float
) -> set[bytes]:
    store.set(f"post/{process_index}/key", own)
    return {store.get(f"post/{index}/key", _left_s(deadline_s)) for index in range(num_processes)}


def _guard(context: zmq.Context[Any], members: set[bytes]) -> zmq.auth.thread.ThreadAuthenticator:
    log = logging.getLogger("rrfp_jax.auth")
    log.setLevel(logging.ERROR)  # who was let in is no news
    guard = zmq.auth.thread.ThreadAuthenticator(context, log=log)
    guard.start()
    guard.configure_curve_callback(credentials_provider=_Members(members))
    return guard


@final
class _Members:
    """Says of a public key whether it is one of the job's."""

    def __init__(self, known: set[bytes]) -> None:
        self._known = known

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this key may come in."""
        return key in self._known


def _find_others(
    process_index: int, num_processes: int, store: Store, deadline_s: float
) -> dict[int, _Address]:
    found, missing = {}, []
    for index in range(num_processes):
        if index == process_index:
            continue
        try:
            value = store.get(f"post/{index}", _left_s(deadline_s))
        except JobError:
            missing.append(index)
        else:
            found[index] = msgspec.msgpack.decode(value, type=_Address)
    if missing:
        raise JobError(f"{in_words(missing)} did not say in time where to reach them.")
    return found


def _left_s(deadline_s: float) -> float:
    # Those that come last are still looked at, each for a moment.
    return max(0.05, deadline_s - time.monotonic())
