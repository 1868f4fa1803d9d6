"""Messages between the processes of a job, over ZeroMQ.

Every process has an inbox (a ROUTER socket) and, for each other process, an outbox (a
DEALER socket that is connected to that one's inbox). Outboxes are used by whatever thread
has something to send, under a lock, and never block; one thread reads the inbox and hands
messages to the handlers of their channels. So messages from one process to another keep
their order.

Who may talk. With ``curve`` every process makes a key pair and only the job's public keys
are let in: a stranger does not get as far as a message. In either mode a message carries
the job's token, a secret that is made anew for each start, so that what is left over from an
earlier one is not taken. What does not carry it is dropped, with a warning for the first
of each kind. A message that repeats an earlier one's number is dropped; a gap in the
numbers ends the job, because what is missing will not come.

Who is alive. ZeroMQ's own heartbeats run outside of Python, so a process that compiles
for minutes answers them and one that is stopped does not. A closed connection that is
refused when it is tried again means a dead process; any other silence means one as soon
as it has lasted for the peer timeout. A process that leaves says good-bye first.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import msgspec
import zmq
import zmq.auth.thread
import zmq.utils.monitor

from rrfp_jax.job.errors import JobError, PeerLostError, StepAbortedError
from rrfp_jax.job.store import Store

_log = logging.getLogger("rrfp_jax")

# Long arrays are sent in pieces: large enough for the full rate, small enough that what is
# behind them waits a few milliseconds at most.
PIECE_BYTES = 1 << 20
# Of one buffer. A peer that announces more is cut off before anything is allocated.
LARGEST_BUFFER_BYTES = 64 << 20
_LARGEST_FRAME_BYTES = LARGEST_BUFFER_BYTES + (1 << 20)
# Messages to one process that it has not taken. A step's budget allows far fewer.
_MOST_WAITING = 100_000
# Between two looks at connections.
_LOOK_MS = 50
# A connection that was refused may have met a process between two listens; not for so long.
_REFUSED_S = 1.5
_LINGER_S = 2.0

Handler: TypeAlias = Callable[[int, bytes, Sequence[memoryview]], None]


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


class _Letter(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of every message: from whom, which one, and what for."""

    token: bytes
    source: int
    number: int
    channel: str
    header: bytes


class _Abort(msgspec.Struct, array_like=True, frozen=True):
    message: str
    lost_process: int | None


# Channels of the post itself.
_GATHER, _GATHERED, _ABORT, _BYE = "post/gather", "post/gathered", "post/abort", "post/bye"

_read_letter = msgspec.msgpack.Decoder(_Letter).decode
_write = msgspec.msgpack.Encoder().encode


class _Peer:
    """Another process: its outbox, and what is known of it."""

    def __init__(self, index: int, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self.index = index
        self.socket = socket
        self.monitor = monitor
        self.lock = threading.Lock()
        self.num_sent = 0
        self.num_received = 0
        self.has_left = False
        self.is_connected = False
        # On the monotonic clock: since when it is not connected, and since when it is refused.
        self.silent_since_s: float | None = None
        self.refused_since_s: float | None = None


@final
class Post:
    """The messages of one process. Owns sockets and a thread; `close` ends them."""

    def __init__(
        self,
        *,
        process_index: int,
        num_processes: int,
        options: PostOptions,
        token: bytes,
        context: zmq.Context[Any],
        inbox: zmq.Socket[bytes],
        peers: Mapping[int, _Peer],
        guard: zmq.auth.thread.ThreadAuthenticator | None,
    ) -> None:
        """Not to be called; see `open`."""
        self.process_index = process_index
        self.num_processes = num_processes
        self._options = options
        self._token = token
        self._context = context
        self._inbox = inbox
        self._peers = peers
        self._guard = guard
        self._at_the_door = inbox.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._handlers: dict[str, Handler] = {
            _GATHER: self._on_gather,
            _GATHERED: self._on_gathered,
            _ABORT: self._on_abort,
            _BYE: self._on_bye,
        }
        self._losses: list[Callable[[JobError], None]] = []
        self._changed = threading.Condition()
        self._failure: JobError | None = None
        self._brought: dict[str, dict[int, bytes]] = {}
        self._gathered: dict[str, list[bytes]] = {}
        self._reports: dict[int, str] = {}
        self._warned: set[str] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rrfp-post", daemon=True)
        self._thread.start()

    @staticmethod
    def open(
        *,
        process_index: int,
        num_processes: int,
        host: str,
        store: Store,
        options: PostOptions,
    ) -> Post:
        """Starts to listen, finds the others and connects to all of them.

        Args:
          process_index: Of this process.
          num_processes: Of the job.
          host: The address of this process at which the others reach it.
          store: Where addresses, keys and the token are exchanged.
          options: How to talk.

        Raises:
          JobError: An address cannot be had, or a process did not come in time.
        """
        deadline_s = time.monotonic() + options.start_timeout_s
        public_key, secret_key = zmq.curve_keypair()
        context: zmq.Context[Any] = zmq.Context(io_threads=2)
        inbox = context.socket(zmq.ROUTER)
        _bound(inbox, options)
        guard = None
        if options.security == "curve":
            guard = zmq.auth.thread.ThreadAuthenticator(context, log=_quiet_log())
            guard.start()
            inbox.curve_server = True
            inbox.curve_publickey, inbox.curve_secretkey = public_key, secret_key
        address, token = _meet(
            process_index, num_processes, host, store, inbox, public_key, guard, deadline_s
        )
        peers = {}
        for index, other in address.items():
            outbox = context.socket(zmq.DEALER)
            _bound(outbox, options)
            # A dead process is told from a slow one by how it refuses; see `_watch`.
            outbox.heartbeat_ivl = int(options.peer_timeout_s * 100)
            outbox.heartbeat_timeout = int(options.peer_timeout_s * 500)
            outbox.reconnect_ivl, outbox.reconnect_ivl_max = 100, 500
            outbox.handshake_ivl = int(options.peer_timeout_s * 250)
            if options.security == "curve":
                outbox.curve_publickey, outbox.curve_secretkey = public_key, secret_key
                outbox.curve_serverkey = other.public_key
            monitor = outbox.get_monitor_socket()
            outbox.connect(other.endpoint)
            peers[index] = _Peer(index, outbox, monitor)
        post = Post(
            process_index=process_index,
            num_processes=num_processes,
            options=options,
            token=token,
            context=context,
            inbox=inbox,
            peers=peers,
            guard=guard,
        )
        try:
            post._wait_for_connections(deadline_s)
        except BaseException:
            post.close()
            raise
        return post

    def send(self, process: int, channel: str, header: bytes, buffers: Sequence[Any] = ()) -> None:
        """Sends a message; does not wait. From any thread.

        Args:
          process: To whom; another one.
          channel: Whose handler is to get it.
          header: Small.
          buffers: Objects with the buffer protocol, of at most `LARGEST_BUFFER_BYTES` each.
            Not copied: they have to stay as they are until they have left, and are kept
            alive so long.

        Raises:
          JobError: The process takes no messages, or has been lost.
          ValueError: A buffer is too large.
        """
        for buffer in buffers:
            if (size := memoryview(buffer).nbytes) > LARGEST_BUFFER_BYTES:
                raise ValueError(
                    f"a buffer of a message has at most {LARGEST_BUFFER_BYTES} bytes, got {size}; "
                    "send it in pieces."
                )
        peer = self._peers[process]
        with peer.lock:
            letter = _Letter(self._token, self.process_index, peer.num_sent, channel, header)
            try:
                more = zmq.SNDMORE if buffers else 0
                peer.socket.send(_write(letter), zmq.NOBLOCK | more)
                if buffers:
                    # Either all parts of a message are queued or none: they will not block.
                    peer.socket.send_multipart(buffers, zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:
                raise self._failure or JobError(
                    f"process {process} takes no messages ({error}); {_MOST_WAITING} may wait."
                ) from error
            peer.num_sent += 1

    def subscribe(self, channel: str, handler: Handler) -> None:
        """Gives the messages of a channel to a handler, on the thread that reads the inbox.

        The handler gets the process that sent the message, its header and its buffers, and
        must not wait for anything.
        """
        self._handlers[channel] = handler

    def unsubscribe(self, channel: str) -> None:
        """Drops the messages of a channel from now on."""
        self._handlers.pop(channel, None)

    def on_loss(self, handler: Callable[[JobError], None]) -> None:
        """Calls a handler once, when a process is lost or has given up; at once if one has."""
        with self._changed:
            failure = self._failure
            if failure is None:
                self._losses.append(handler)
        if failure is not None:
            handler(failure)

    def off_loss(self, handler: Callable[[JobError], None]) -> None:
        """Forgets a handler of `on_loss`."""
        with self._changed:
            if handler in self._losses:
                self._losses.remove(handler)

    def wait_for_failure(self, timeout_s: float) -> JobError | None:
        """What ended the job, if that comes to be known in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, timeout_s)
            return self._failure

    def check(self) -> None:
        """Raises what ended the job, if something has."""
        if self._failure is not None:
            raise self._failure

    def gather(self, topic: str, value: bytes, timeout_s: float) -> list[bytes]:
        """Gives every process what each has brought, in the order of the processes.

        They meet at process 0, so it costs two messages for each other process.

        Args:
          topic: The same in every process, and used once.
          value: What this process brings.
          timeout_s: How long to wait for the others.

        Raises:
          PeerLostError: A process was lost, or did not come.
          StepAbortedError: A process has given up.
        """
        if self.process_index == 0:
            return self._gather_all(topic, value, timeout_s)
        self.check()
        self.send(0, _GATHER, topic.encode(), [value])
        with self._changed:
            # Process 0 waits as long, and knows who is missing: let it speak first.
            self._changed.wait_for(
                lambda: topic in self._gathered or self._failure is not None, timeout_s + 2.0
            )
            if topic in self._gathered:
                return self._gathered.pop(topic)
        self.check()
        raise PeerLostError(
            0, f"process 0 did not come to {topic!r} within {timeout_s:g} s; it may be stuck."
        )

    def abort(self, message: str, lost_process: int | None = None) -> None:
        """Tells every other process that this one gives up; does not wait.

        Args:
          message: Why, with all that this process knows.
          lost_process: Whom it has lost, if that is why.
        """
        told = _write(_Abort(message, lost_process))
        for index, peer in self._peers.items():
            if not peer.has_left:
                try:
                    self.send(index, _ABORT, told)
                except JobError:
                    _log.debug("process %d could not be told", index, exc_info=True)

    def collect_reports(self, timeout_s: float) -> dict[int, str]:
        """What the others that are still there said as they gave up, by process."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(
                    index in self._reports or peer.has_left or not peer.is_connected
                    for index, peer in self._peers.items()
                ),
                timeout_s,
            )
            return dict(self._reports)

    def wait_for_departures(self, timeout_s: float) -> bool:
        """Whether all others have left, or cannot be reached, within a time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(p.has_left or not p.is_connected for p in self._peers.values()),
                timeout_s,
            )

    def close(self) -> None:
        """Says good-bye, and ends the thread and the sockets."""
        if self._closing:
            return
        staying = [peer for peer in self._peers.values() if peer.is_connected and not peer.has_left]
        for peer in staying:
            try:
                self.send(peer.index, _BYE, b"")
            except JobError:
                _log.debug("process %d could not be told", peer.index, exc_info=True)
        self._closing = True
        self._thread.join()
        if self._guard is not None:
            self._guard.stop()
        for peer in self._peers.values():
            peer.socket.disable_monitor()
            peer.monitor.close(linger=0)
            peer.socket.close(linger=int(_LINGER_S * 1000) if peer in staying else 0)
        self._inbox.disable_monitor()
        self._at_the_door.close(linger=0)
        self._inbox.close(linger=0)
        self._context.term()

    def _gather_all(self, topic: str, value: bytes, timeout_s: float) -> list[bytes]:
        def missing() -> list[int]:
            return [i for i in self._peers if i not in self._brought.get(topic, {})]

        with self._changed:
            self._changed.wait_for(lambda: not missing() or self._failure is not None, timeout_s)
            if not (absent := missing()):
                brought = self._brought.pop(topic, {}) | {0: value}
        if absent:
            self.check()
            error = PeerLostError(
                absent[0],
                f"{_processes(absent)} did not come to {topic!r} within {timeout_s:g} s.",
            )
            self.abort(str(error), absent[0])
            raise error
        values = [brought[index] for index in range(self.num_processes)]
        header, packed = topic.encode(), _write(values)
        for index in self._peers:
            self.send(index, _GATHERED, header, [packed])
        return values

    def _wait_for_connections(self, deadline_s: float) -> None:
        def missing() -> list[int]:
            return [index for index, peer in self._peers.items() if not peer.is_connected]

        with self._changed:
            left_s = max(0.0, deadline_s - time.monotonic())
            self._changed.wait_for(lambda: not missing() or self._failure is not None, left_s)
        self.check()
        if absent := missing():
            raise PeerLostError(
                absent[0],
                f"no connection to {_processes(absent)} within "
                f"{self._options.start_timeout_s:g} s; look at firewalls between the hosts.",
            )

    # What follows runs on the post's own thread.

    def _run(self) -> None:
        # Waiting for the inbox alone is quicker than polling many sockets. The others are looked
        # at now and then, a peer that never stops sending notwithstanding.
        self._inbox.rcvtimeo = _LOOK_MS
        looked_s = 0.0
        while not self._closing:
            self._read_inbox()
            if time.monotonic() - looked_s >= _LOOK_MS / 1000:
                looked_s = time.monotonic()
                self._read_monitors()
                self._watch()

    def _read_inbox(self) -> None:
        """Waits for a message, not for long, and reads it."""
        try:
            self._inbox.recv()  # the sender's address, which is of no use
        except zmq.Again:
            return
        first = self._inbox.recv() if self._inbox.rcvmore else b""
        # Small frames are quicker to copy, large ones are not copied.
        rest = self._inbox.recv_multipart(copy=False) if self._inbox.rcvmore else []
        self._read(first, [frame.buffer for frame in rest])

    def _read(self, first: bytes, buffers: Sequence[memoryview]) -> None:
        try:
            letter = _read_letter(first)
        except msgspec.MsgspecError:
            self._warn("a message that is none of ours")
            return
        peer = self._peers.get(letter.source)
        if peer is None or not secrets.compare_digest(letter.token, self._token):
            self._warn("a message of another job, or of an earlier start of this one")
            return
        if letter.number < peer.num_received:
            self._warn(f"a repeated message of process {peer.index}")
            return
        if letter.number > peer.num_received:
            self._fail(
                PeerLostError(
                    peer.index,
                    f"{letter.number - peer.num_received} messages of process {peer.index} to "
                    f"process {self.process_index} were lost on the way; the connection broke.",
                )
            )
            return
        peer.num_received += 1
        handler = self._handlers.get(letter.channel)
        if handler is None:
            self._warn(f"a message on the channel {letter.channel!r}, which nobody reads")
            return
        try:
            handler(peer.index, letter.header, buffers)
        except Exception as error:  # whatever it was, it must not silence the post
            _log.exception("a message on %s could not be handled", letter.channel)
            self._fail(JobError(f"a message on {letter.channel!r} failed: {error}"))

    def _read_monitors(self) -> None:
        for _ in _events(self._at_the_door):
            self._warn("a connection of a stranger, who has no key or speaks another language")
        for peer in self._peers.values():
            for event in _events(peer.monitor):
                self._note(peer, event)

    def _note(self, peer: _Peer, event: int) -> None:
        """Takes down what has become of a connection."""
        now_s = time.monotonic()
        with self._changed:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                peer.is_connected = True
                peer.silent_since_s = peer.refused_since_s = None
            elif event == zmq.EVENT_DISCONNECTED:
                peer.is_connected = False
                peer.silent_since_s = peer.silent_since_s or now_s
            elif event == zmq.EVENT_CLOSED and peer.silent_since_s is not None:
                # A new connection came to nothing: nobody listens there any more.
                peer.refused_since_s = peer.refused_since_s or now_s
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._warn(f"process {peer.index} does not accept this process's key")
            self._changed.notify_all()

    def _watch(self) -> None:
        """Gives up those that have been away for too long."""
        now_s = time.monotonic()
        for peer in self._peers.values():
            if peer.silent_since_s is None or peer.has_left:
                continue
            refused_s = now_s - (peer.refused_since_s or now_s)
            # The heartbeats have taken the first part of the timeout before they gave up.
            if refused_s > min(_REFUSED_S, 0.2 * self._options.peer_timeout_s):
                why = "its connection was closed and is refused: it has died"
            elif now_s - peer.silent_since_s > 0.3 * self._options.peer_timeout_s:
                why = (
                    f"it has not answered for {self._options.peer_timeout_s:g} s "
                    "(transport.peer_timeout_s): it is stuck, or cannot be reached"
                )
            else:
                continue
            self._fail(PeerLostError(peer.index, f"process {peer.index} was lost: {why}."))

    def _fail(self, error: JobError) -> None:
        with self._changed:
            if self._failure is not None or self._closing:
                return
            self._failure = error
            losses, self._losses = self._losses, []
            self._changed.notify_all()
        for handler in losses:
            handler(error)

    def _on_gather(self, source: int, header: bytes, buffers: Sequence[memoryview]) -> None:
        with self._changed:
            self._brought.setdefault(header.decode(), {})[source] = bytes(buffers[0])
            self._changed.notify_all()

    def _on_gathered(self, source: int, header: bytes, buffers: Sequence[memoryview]) -> None:
        values = msgspec.msgpack.decode(buffers[0], type=list[bytes])
        with self._changed:
            self._gathered[header.decode()] = values
            self._changed.notify_all()

    def _on_abort(self, source: int, header: bytes, buffers: Sequence[memoryview]) -> None:
        told = msgspec.msgpack.decode(header, type=_Abort)
        with self._changed:
            self._reports[source] = told.message
            self._changed.notify_all()
        # The first line says why. The rest, what its stages waited for, is for the report.
        reason = told.message.partition("\n")[0]
        self._fail(StepAbortedError(source, reason, told.lost_process))

    def _on_bye(self, source: int, header: bytes, buffers: Sequence[memoryview]) -> None:
        with self._changed:
            self._peers[source].has_left = True
            self._changed.notify_all()

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("dropped %s (said once)", what)


def _events(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    """What a socket's monitor has to tell by now."""
    while True:
        try:
            yield zmq.utils.monitor.recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return


def _bound(socket: zmq.Socket[bytes], options: PostOptions) -> None:
    """Limits what a socket holds and takes."""
    socket.sndhwm = socket.rcvhwm = _MOST_WAITING
    socket.maxmsgsize = _LARGEST_FRAME_BYTES


def _meet(
    process_index: int,
    num_processes: int,
    host: str,
    store: Store,
    inbox: zmq.Socket[bytes],
    public_key: bytes,
    guard: zmq.auth.thread.ThreadAuthenticator | None,
    deadline_s: float,
) -> tuple[dict[int, _Address], bytes]:
    """Exchanges addresses and the token. Returns those of the others, and the token."""
    if guard is None:
        port = inbox.bind_to_random_port(f"tcp://{host}")
        endpoint = f"tcp://{host}:{port}"
        store.set(f"post/{process_index}", _write(_Address(endpoint, public_key)))
    else:
        # Nobody is let in before it is known who may come, so a port is taken only then.
        store.set(f"post/{process_index}/key", public_key)
        known = {
            store.get(f"post/{index}/key", _left_s(deadline_s)) for index in range(num_processes)
        }
        guard.configure_curve_callback(credentials_provider=_Members(known))
        port = inbox.bind_to_random_port(f"tcp://{host}")
        endpoint = f"tcp://{host}:{port}"
        store.set(f"post/{process_index}", _write(_Address(endpoint, public_key)))
    if process_index == 0:
        store.set("post/token", secrets.token_bytes(16))
    token = store.get("post/token", _left_s(deadline_s))
    found = {}
    missing = []
    for index in range(num_processes):
        try:
            value = store.get(f"post/{index}", _left_s(deadline_s))
            found[index] = msgspec.msgpack.decode(value, type=_Address)
        except JobError:
            missing.append(index)
    if missing:
        raise JobError(f"{_processes(missing)} did not say in time where to reach them.")
    del found[process_index]
    return found, token


class _Members:
    """Says of a public key whether it is one of the job's."""

    def __init__(self, known: set[bytes]) -> None:
        self._known = known

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this key may come in."""
        return key in self._known


def meet(
    store: Store, topic: str, process_index: int, num_processes: int, timeout_s: float
) -> None:
    """Waits until every process has come here, before a post is open.

    Raises:
      JobError: Some did not come in time; the message has their numbers.
    """
    deadline_s = time.monotonic() + timeout_s
    store.set(f"meet/{topic}/{process_index}", b"here")
    missing = []
    for index in range(num_processes):
        try:
            store.get(f"meet/{topic}/{index}", _left_s(deadline_s))
        except JobError:
            missing.append(index)
    if missing:
        raise JobError(f"{_processes(missing)} did not come to {topic!r} within {timeout_s:g} s.")


def _left_s(deadline_s: float) -> float:
    # Those that come last are still looked at, each for a moment.
    return max(0.05, deadline_s - time.monotonic())


def _processes(indices: Sequence[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _quiet_log() -> logging.Logger:
    log = logging.getLogger("rrfp_jax.auth")
    log.setLevel(logging.ERROR)
    return log
