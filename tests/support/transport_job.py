"""A script for three processes: drives the transport by hand, with faults. Prints JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from rrfp_jax import start_job
from rrfp_jax.dispatch.delays import no_delays
from rrfp_jax.dispatch.messages import Bundle
from rrfp_jax.dispatch.moves import ArrayMover
from rrfp_jax.dispatch.network import NetworkTransport
from rrfp_jax.dispatch.transport import Mailbox
from rrfp_jax.task import Payload
from rrfp_jax.topology import lay_out

LIMIT_S = 30.0


class Box:
    """What a transport has put into a mailbox."""

    def __init__(self):
        self.delivered, self.lost = queue.SimpleQueue(), queue.SimpleQueue()

    @property
    def mailbox(self):
        return Mailbox(
            deliver=self.delivered.put,
            lose=lambda bundle, reason: self.lost.put((str(bundle), reason)),
            hear=lambda *heard: None,
            abort=lambda error: self.lost.put(("abort", str(error))),
        )


class Meddling:
    """A post that repeats, damages or holds back what it sends."""

    def __init__(self, post):
        self.post = post
        self.fault = None
        self.held = []

    def __getattr__(self, name):
        return getattr(self.post, name)

    def send(self, process, channel, header, buffers=()):
        if self.fault == "hold":
            self.held.append((process, channel, header, [np.array(b) for b in buffers]))
            return
        if self.fault == "damage":
            buffers = [np.array(each) for each in buffers]
            buffers[0][0] ^= 1
        for _ in range(2 if self.fault == "repeat" else 1):
            self.post.send(process, channel, header, buffers)


def bundle(microbatch, *arrays):
    return Bundle(
        payload=Payload.ACTIVATION, source=0, target=1, microbatch=microbatch, arrays=arrays
    )


def main():
    logging.basicConfig(level=logging.WARNING)
    with start_job() as job:
        print(json.dumps(run(job)), flush=True)


def run(job):
    index, post = job.process_index, Meddling(job.post)
    topology = lay_out(jax.devices(), stages=3)

    def layout(replica, stage, shape):
        return topology.group(replica, stage).rows(shape)

    transport, mover, box, found = (
        NetworkTransport(post, topology, layout, no_delays()),
        ArrayMover(job.post),
        Box(),
        {},
    )

    def meet(what):
        job.post.gather(what, b"", LIMIT_S)

    def put(values):
        return jax.device_put(values, layout(0, index, np.shape(values)))

    large = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8)
    kinds = [jnp.bfloat16, jnp.bool_, jnp.int32, jnp.float32]
    meet("made")
    transport.open(0, box.mailbox)
    if index == 0:
        found["hash"] = hashlib.sha256(large).hexdigest()
        transport.send(bundle(0, put(large), *[put(np.arange(6).astype(k)) for k in kinds]))
        found["dtypes"] = [str(np.arange(6).astype(k)) for k in kinds]
    if index == 1:
        got = box.delivered.get(timeout=LIMIT_S)
        found["hash"] = hashlib.sha256(np.asarray(got.arrays[0])).hexdigest()
        found["dtypes"] = [str(np.asarray(a)) for a in got.arrays[1:]]
    meet("sent whole")
    if index == 0:
        send(transport, post, "repeat", bundle(1, put(np.ones(3))))
        send(transport, post, "damage", bundle(2, put(np.ones(3))))
        send(transport, post, None, bundle(3, put(np.ones(3))))
    if index == 1:
        microbatches = [box.delivered.get(timeout=LIMIT_S).microbatch for _ in range(2)]
        found["repeated"] = microbatches.count(1)
        name, found["why"] = box.lost.get(timeout=LIMIT_S)
        found["damaged"] = [name]
    meet("sent with faults")
    if index == 0:
        send(transport, post, "hold", bundle(4, put(np.ones(3))))
    transport.close()
    # The first process is a step ahead: what it sends waits until the second one is there.
    if index == 0:
        transport.open(1, box.mailbox)
        for late in post.held:
            job.post.send(*late)
        send(transport, post, None, bundle(7, put(np.ones(3))))
    meet("a step ahead")
    if index != 0:
        transport.open(1, box.mailbox)
    if index == 1:
        found["early"] = [box.delivered.get(timeout=LIMIT_S).microbatch]
        found["late"] = [] if box.delivered.empty() else [box.delivered.get().microbatch]
    meet("the end")
    transport.close()
    found["moved"] = moved(mover, index)
    return found


def send(transport, post, fault, what):
    """Sends a bundle with a fault, and waits until the sender has done so."""
    post.fault = fault
    transport.send(what)
    transport._outgoing.put(None)
    transport._threads[0].join(LIMIT_S)
    post.fault = None
    restart_sender(transport)


def restart_sender(transport):
    mailbox = transport._mailbox
    transport._threads[0] = threading.Thread(
        target=transport._send_all, args=(mailbox, transport._outgoing), daemon=True
    )
    transport._threads[0].start()


def moved(mover, index):
    first, last = jax.devices()[0], jax.devices()[2]
    array = jax.device_put(np.arange(10, dtype=np.int32), first) if index == 0 else None
    result = mover.move(
        "an array",
        array,
        shape=(10,),
        dtype=np.dtype(np.int32),
        source=SingleDeviceSharding(first),
        target=SingleDeviceSharding(last),
        timeout_s=LIMIT_S,
    )
    return None if result is None else np.asarray(result).tolist()


if __name__ == "__main__":
    main()
