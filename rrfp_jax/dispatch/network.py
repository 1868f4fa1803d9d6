"""The transport between processes.

Theory of operation. Three threads share the work, so that a dispatcher never waits:

    sender      takes bundles from the dispatchers, cuts them into pieces, posts them
    post        (of `rrfp_jax.job.post`) hands over what comes; it only queues it
    receiver    checks pieces, puts arrays together and onto devices, delivers bundles

Every process sends the pieces that it holds of its own shards, and a target puts together
what overlaps its own: stages may lie over different numbers of devices and processes. Notes
between the members of a stage group take neither queue: they are sent by the dispatcher
and delivered by the post.

Each `open` begins an *epoch*, in all processes the same one, because all make the same
steps. A message of an older epoch belongs to a step that is over (or was given up) and
is dropped. One of a newer epoch is from a process that is ahead, and waits until this one
has opened it. So a step that is cancelled leaves nothing behind.

What stays inside this process goes by the transport for that.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, final

import jax
import msgspec

from rrfp_jax.dispatch.inprocess import InprocessTransport
from rrfp_jax.dispatch.messages import Bundle
from rrfp_jax.dispatch.notes import Note
from rrfp_jax.dispatch.pieces import Assembly, CorruptPieceError, Piece, outgoing
from rrfp_jax.dispatch.routes import Route, plan_route
from rrfp_jax.dispatch.transport import Layout, Mailbox, Transport
from rrfp_jax.dispatch.wire import NoteHeader, read_note, targets, write_note
from rrfp_jax.job.errors import JobError
from rrfp_jax.job.post import Post
from rrfp_jax.task import Payload
from rrfp_jax.topology import Topology
from rrfp_jax.variability.model import VariabilityModel

_log = logging.getLogger("rrfp_jax")

# Messages of steps that this process has not begun. A step has far fewer.
_MOST_EARLY = 100_000
_JOIN_TIMEOUT_S = 3.0


class _PieceHeader(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Of one piece of one array of a bundle."""

    epoch: int
    payload: Payload
    replica: int
    source: int
    target: int
    microbatch: int
    bucket: int
    num_arrays: int
    array: int
    shape: tuple[int, ...]
    dtype: str
    piece: Piece

    @property
    def bundle(self) -> _Key:
        """Which bundle it belongs to."""
        return self.replica, self.payload, self.target, self.microbatch


_Key: TypeAlias = tuple[int, Payload, int, int]
_Received: TypeAlias = tuple[_PieceHeader, Sequence[memoryview]]
_Header: TypeAlias = _PieceHeader | NoteHeader

_write = msgspec.msgpack.Encoder().encode
_read_piece = msgspec.msgpack.Decoder(_PieceHeader).decode


@final
class NetworkTransport(Transport):
    """Carries bundles and notes between the processes of a job.

    Args:
      post: Open. Every process makes its transport before the first step of any.
      topology: Which devices run which stage.
      layout: Where arrays lie that cross between stages.
    """

    def __init__(self, post: Post, topology: Topology, layout: Layout) -> None:
        self._post = post
        self._topology = topology
        self._layout = layout
        self._variability = VariabilityModel()
        self._inside = InprocessTransport(layout)
        self._routes: dict[tuple[Any, ...], Route] = {}
        self._lock = threading.Lock()
        self._epoch = 0
        self._step = 0
        self._mailbox: Mailbox | None = None
        self._early: list[tuple[_Header, Sequence[memoryview]]] = []
        self._outgoing: queue.SimpleQueue[Bundle | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[_Received | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._bundles = post.own_channel(
            "bundle", lambda _, header, data: self._receive(_read_piece(header), data)
        )
        self._notes = post.own_channel(
            "note", lambda _, header, data: self._receive(read_note(header), data)
        )

    def open(self, step: int, mailbox: Mailbox, variability: VariabilityModel) -> None:
        """Begins an epoch, and the threads of a step."""
        self._inside.open(step, mailbox, variability)
        self._outgoing, self._incoming = queue.SimpleQueue(), queue.SimpleQueue()
        with self._lock:
            self._epoch += 1
            self._step, self._mailbox, self._variability = step, mailbox, variability
            # Under the lock, so that what comes meanwhile stays behind what came before.
            early, self._early = self._early, []
            for header, data in early:
                self._sort_in(header, data)
        # Each has what belongs to its step: one that is still busy when the step is given up
        # must not take part in the next one.
        self._threads = [
            threading.Thread(target=self._send_all, args=(self._epoch, self._outgoing, mailbox)),
            threading.Thread(target=self._receive_all, args=(self._incoming, mailbox)),
        ]
        for thread, name in zip(self._threads, ("rrfp-send", "rrfp-receive"), strict=True):
            thread.name, thread.daemon = name, True
            thread.start()
        self._post.on_loss(mailbox.abort)

    def send(self, bundle: Bundle) -> None:
        """Queues a bundle for the sender."""
        groups = [
            self._topology.group(bundle.replica, stage) for stage in (bundle.source, bundle.target)
        ]
        if all(group.processes == (self._process,) for group in groups):
            self._inside.send(bundle)
        else:
            self._outgoing.put(bundle)

    def tell(self, replica: int, stage: int, note: Note) -> None:
        """Sends a note at once: a Ready to the leader, all else to every other member."""
        members = self._topology.group(replica, stage).processes
        header = write_note(self._epoch, replica, stage, note)
        for member in targets(note, members.index(self._process), len(members)):
            self._post.send(members[member], self._notes, header)

    def close(self) -> None:
        """Ends the step's threads; whatever else comes for this step is dropped."""
        with self._lock:
            mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            self._post.off_loss(mailbox.abort)
        self._inside.close()
        self._outgoing.put(None)
        self._incoming.put(None)
        deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    @property
    def _process(self) -> int:
        return self._post.process_index

    def _route(self, replica: int, source: int, target: int, shape: tuple[int, ...]) -> Route:
        key = (replica, source, target, shape)
        if key not in self._routes:
            self._routes[key] = plan_route(
                shape, self._layout(replica, source, shape), self._layout(replica, target, shape)
            )
        return self._routes[key]

    # The sender.

    def _send_all(
        self, epoch: int, work: queue.SimpleQueue[Bundle | None], mailbox: Mailbox
    ) -> None:
        while (bundle := work.get()) is not None:
            try:
                self._post_pieces(epoch, bundle)
            except Exception as error:  # whatever it was, the step cannot go on
                mailbox.abort(error)

    def _post_pieces(self, epoch: int, bundle: Bundle) -> None:
        own = self._process
        for number, array in enumerate(bundle.arrays):
            route = self._route(bundle.replica, bundle.source, bundle.target, array.shape)
            for region, piece, buffer in outgoing(array, route, own):
                header = _PieceHeader(
                    epoch=epoch,
                    payload=bundle.payload,
                    replica=bundle.replica,
                    source=bundle.source,
                    target=bundle.target,
                    microbatch=bundle.microbatch,
                    bucket=bundle.bucket,
                    num_arrays=len(bundle.arrays),
                    array=number,
                    shape=array.shape,
                    dtype=array.dtype.name,
                    piece=piece,
                )
                if region.target == own:
                    self._receive(header, [memoryview(buffer)])
                else:
                    self._post.send(region.target, self._bundles, _write(header), [buffer])

    # On the thread of the post, or of the sender.

    def _receive(self, header: _Header, data: Sequence[memoryview]) -> None:
        with self._lock:
            self._sort_in(header, data)

    def _sort_in(self, header: _Header, data: Sequence[memoryview]) -> None:
        """To the receiver or to its stage, now or when its epoch begins; or nowhere."""
        if header.epoch > self._epoch:
            if len(self._early) == _MOST_EARLY:
                raise JobError(
                    f"{_MOST_EARLY} messages came for steps that this process has not begun; the "
                    "processes do not make the same steps."
                )
            self._early.append((header, data))
        elif header.epoch < self._epoch or self._mailbox is None:
            _log.debug("dropped a message of a step that is over: %s", header)
        elif isinstance(header, _PieceHeader):
            self._incoming.put((header, data))
        else:
            self._mailbox.hear(header.replica, header.stage, header.note)

    # The receiver.

    def _receive_all(self, work: queue.SimpleQueue[_Received | None], mailbox: Mailbox) -> None:
        arrivals = _Arrivals(self, mailbox)
        while True:
            try:
                received = work.get(timeout=arrivals.wait_s())
            except queue.Empty:
                arrivals.deliver_due()
                continue
            if received is None:
                return
            try:
                arrivals.take(*received)
                arrivals.deliver_due()
            except Exception as error:  # whatever it was, the step cannot go on
                mailbox.abort(error)

    def due_ns(self, bundle: Bundle) -> int:
        """When a bundle that is here is to be delivered; 0 for at once."""
        delay_ns = self._variability.transfer_ns(
            self._step, bundle.payload, bundle.source, bundle.microbatch, replica=bundle.replica
        )
        return time.monotonic_ns() + delay_ns if delay_ns else 0

    def assembly(self, header: _PieceHeader) -> Assembly:
        """For the array that a piece belongs to."""
        route = self._route(header.replica, header.source, header.target, header.shape)
        return Assembly(header.shape, jax.numpy.dtype(header.dtype), route, self._process)

    def place(self, header: _PieceHeader) -> jax.sharding.Sharding:
        """Where the array that a piece belongs to is to lie."""
        return self._layout(header.replica, header.target, header.shape)


class _Arrivals:
    """The bundles of one step that are on their way; owned by the receiver.

    A bundle that was delivered or lost is remembered, so that a repeat changes nothing.
    """

    def __init__(self, transport: NetworkTransport, mailbox: Mailbox) -> None:
        self._transport = transport
        self._mailbox = mailbox
        self._assemblies: dict[_Key, dict[int, tuple[_PieceHeader, Assembly]]] = {}
        self._done: set[_Key] = set()
        self._warned: set[_Key] = set()
        self._due: list[tuple[int, int, Bundle]] = []
        self._tickets = itertools.count()

    def take(self, header: _PieceHeader, data: Sequence[memoryview]) -> None:
        """Takes one piece."""
        key = header.bundle
        if key in self._done:
            self._repeated(key, header)
            return
        parts = self._assemblies.setdefault(key, {})
        if header.array not in parts:
            parts[header.array] = header, self._transport.assembly(header)
        try:
            is_new = parts[header.array][1].add(header.piece, data[0])
        except CorruptPieceError as error:
            self._forget(key)
            self._mailbox.lose(_bundle(header), f"it came damaged: {error}")
            return
        if not is_new:
            self._repeated(key, header)
        complete = len(parts) == header.num_arrays and all(a.is_complete for _, a in parts.values())
        if complete:
            self._complete(key, header, parts)

    def wait_s(self) -> float | None:
        """Until the next bundle is due; None for none."""
        if not self._due:
            return None
        return max(0.0, (self._due[0][0] - time.monotonic_ns()) / 1e9)

    def deliver_due(self) -> None:
        """Delivers what is due."""
        while self._due and self._due[0][0] <= time.monotonic_ns():
            self._mailbox.deliver(heapq.heappop(self._due)[2])

    def _complete(
        self, key: _Key, header: _PieceHeader, parts: dict[int, tuple[_PieceHeader, Assembly]]
    ) -> None:
        in_order = [parts[number] for number in range(header.num_arrays)]
        arrays = [assembly.build(self._transport.place(own)) for own, assembly in in_order]
        for array in arrays:
            array.block_until_ready()
        self._forget(key)
        bundle = replace(_bundle(header), arrays=arrays)
        heapq.heappush(self._due, (self._transport.due_ns(bundle), next(self._tickets), bundle))

    def _repeated(self, key: _Key, header: _PieceHeader) -> None:
        if key not in self._warned:  # a long bundle has thousands of pieces
            self._warned.add(key)
            _log.warning("dropped a repeated piece of the %s", _bundle(header))

    def _forget(self, key: _Key) -> None:
        self._done.add(key)
        del self._assemblies[key]


def _bundle(header: _PieceHeader) -> Bundle:
    return Bundle(
        payload=header.payload,
        replica=header.replica,
        source=header.source,
        target=header.target,
        microbatch=header.microbatch,
        bucket=header.bucket,
        arrays=(),
    )
