"""Messages between the processes of a job, over ZeroMQ.

Outboxes (see `rrfp_jax.job.sockets`) are used by whatever thread has something to send,
under a lock, and never block; one thread reads the inbox and hands messages to the
handlers of their channels. So messages from one process to another keep their order.

A message carries the job's token, which is made anew for each start, so that what is left
over from an earlier one is not taken. What does not carry it is dropped, with a warning
for the first of each kind. A message that repeats an earlier one's number is dropped; a
gap in the numbers ends the job, because what is missing will not come.

The same thread looks after the other processes (see `rrfp_jax.job.peer`). The first one
that is lost, or that says that it gives up, ends the job: whoever waits for something, here
or in a handler of `Post.on_loss`, is told.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import msgspec
import zmq

from rrfp_jax.job.errors import JobError, PeerLostError, StepAbortedError
from rrfp_jax.job.peer import monitored
from rrfp_jax.job.sockets import (
    LARGEST_BUFFER_BYTES,
    MOST_WAITING,
    PostOptions,
    Sockets,
    in_words,
    open_sockets,
)
from rrfp_jax.job.store import Store

_log = logging.getLogger("rrfp_jax")

# Between two looks at connections.
_LOOK_MS = 50

Handler: TypeAlias = Callable[[int, bytes, Sequence[memoryview]], None]


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


@final
class Post:
    """The messages of one process. Owns sockets and a thread; `close` ends them."""

    def __init__(self, *, process_index: int, num_processes: int, sockets: Sockets) -> None:
        """Not to be called; see `open`."""
        self.process_index = process_index
        self.num_processes = num_processes
        self._sockets = sockets
        self._peers = sockets.peers
        self._handlers: dict[str, Handler] = {
            _GATHER: self._on_gather,
            _GATHERED: self._on_gathered,
            _ABORT: self._on_abort,
            _BYE: self._on_bye,
        }
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
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
        """Opens the post of a process, and waits until it is connected to all others.

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
        sockets = open_sockets(process_index, num_processes, host, store, options)
        post = Post(process_index=process_index, num_processes=num_processes, sockets=sockets)
        try:
            post._wait_for_connections(deadline_s, options.start_timeout_s)
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
            letter = _Letter(
                self._sockets.token, self.process_index, peer.num_sent, channel, header
            )
            try:
                more = zmq.SNDMORE if buffers else 0
                peer.outbox.send(_write(letter), zmq.NOBLOCK | more)
                if buffers:
                    # Either all parts of a message are queued or none: they will not block.
                    peer.outbox.send_multipart(buffers, zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:
                raise self._failure or JobError(
                    f"process {process} takes no messages ({error}); {MOST_WAITING} may wait."
                ) from error
            peer.num_sent += 1

    def subscribe(self, channel: str, handler: Handler) -> None:
        """Gives the messages of a channel to a handler, on the thread that reads the inbox.

        The handler gets the process that sent the message, its header and its buffers, and
        must not wait for anything.
        """
        self._handlers[channel] = handler

    def own_channel(self, name: str, handler: Handler) -> str:
        """Subscribes to a channel that nobody else has, such as one for each pipeline.

        Args:
          name: What it is for. Channels of one name are numbered in the order of the calls,
            which has to be the same in all processes.
          handler: See `subscribe`.

        Returns:
          The channel.
        """
        channel = f"{name}/{next(self._numbers[name])}"
        self.subscribe(channel, handler)
        return channel

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
                    index in self._reports or not peer.is_there
                    for index, peer in self._peers.items()
                ),
                timeout_s,
            )
            return dict(self._reports)

    def wait_for_departures(self, timeout_s: float) -> bool:
        """Whether all others have left, or cannot be reached, within a time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not any(peer.is_there for peer in self._peers.values()), timeout_s
            )

    def close(self) -> None:
        """Says good-bye, and ends the thread and the sockets."""
        if self._closing:
            return
        staying = [peer for peer in self._peers.values() if peer.is_there]
        for peer in staying:
            try:
                self.send(peer.index, _BYE, b"")
            except JobError:
                _log.debug("process %d could not be told", peer.index, exc_info=True)
        self._closing = True
        self._thread.join()
        self._sockets.close(staying)

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
                f"{in_words(absent)} did not come to {topic!r} within {timeout_s:g} s.",
            )
            self.abort(str(error), absent[0])
            raise error
        values = [brought[index] for index in range(self.num_processes)]
        header, packed = topic.encode(), _write(values)
        for index in self._peers:
            self.send(index, _GATHERED, header, [packed])
        return values

    def _wait_for_connections(self, deadline_s: float, timeout_s: float) -> None:
        def missing() -> list[int]:
            return [index for index, peer in self._peers.items() if not peer.is_connected]

        with self._changed:
            left_s = max(0.0, deadline_s - time.monotonic())
            self._changed.wait_for(lambda: not missing() or self._failure is not None, left_s)
        self.check()
        if absent := missing():
            raise PeerLostError(
                absent[0],
                f"no connection to {in_words(absent)} within {timeout_s:g} s; look at firewalls "
                "between the hosts.",
            )

    # What follows runs on the post's own thread.

    def _run(self) -> None:
        # Waiting for the inbox alone is quicker than polling many sockets. The others are looked
        # at now and then, a peer that never stops sending notwithstanding.
        self._sockets.inbox.rcvtimeo = _LOOK_MS
        looked_s = 0.0
        while not self._closing:
            self._read_inbox()
            if time.monotonic() - looked_s >= _LOOK_MS / 1000:
                looked_s = time.monotonic()
                self._look_after_peers(looked_s)

    def _read_inbox(self) -> None:
        """Waits for a message, not for long, and reads it."""
        try:
            self._sockets.inbox.recv()  # the sender's address, which is of no use
        except zmq.Again:
            return
        first = self._sockets.inbox.recv() if self._sockets.inbox.rcvmore else b""
        # Small frames are quicker to copy, large ones are not copied.
        rest = self._sockets.inbox.recv_multipart(copy=False) if self._sockets.inbox.rcvmore else []
        self._read(first, [frame.buffer for frame in rest])

    def _read(self, first: bytes, buffers: Sequence[memoryview]) -> None:
        try:
            letter = _read_letter(first)
        except msgspec.MsgspecError:
            self._warn("a message that is none of ours")
            return
        peer = self._peers.get(letter.source)
        if peer is None or not secrets.compare_digest(letter.token, self._sockets.token):
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

    def _look_after_peers(self, now_s: float) -> None:
        for _ in monitored(self._sockets.at_the_door):
            self._warn("a connection of a stranger, who has no key or speaks another language")
        with self._changed:
            happened = [peer.look(now_s) for peer in self._peers.values()]
            if any(happened):
                self._changed.notify_all()
        for peer in self._peers.values():
            if (why := peer.why_lost(now_s)) is not None:
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
