"""A script for three processes: drives transports by hand, with faults. Prints JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from rrfp_jax import start_job
from rrfp_jax.dispatch import network
from rrfp_jax.dispatch.messages import Bundle
from rrfp_jax.dispatch.moves import ArrayMover
from rrfp_jax.dispatch.network import NetworkTransport
from rrfp_jax.dispatch.transport import Mailbox
from rrfp_jax.job.errors import PeerLostError
from rrfp_jax.task import Payload
from rrfp_jax.topology import Topology, lay_out
from rrfp_jax.variability.model import VariabilityModel

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
        self.gate = threading.Event()

    def __getattr__(self, name):
        return getattr(self.post, name)

    def send(self, process, channel, header, buffers=()):
        if self.fault == "hold":
            self.held.append((process, channel, header, [np.array(b) for b in buffers]))
            return
        if self.fault == "wait":
            self.gate.wait(LIMIT_S)
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
        NetworkTransport(post, topology, layout),
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
    transport.open(0, box.mailbox, VariabilityModel())
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
        transport.open(1, box.mailbox, VariabilityModel())
        for late in post.held:
            job.post.send(*late)
        send(transport, post, None, bundle(7, put(np.ones(3))))
    meet("a step ahead")
    if index != 0:
        transport.open(1, box.mailbox, VariabilityModel())
    if index == 1:
        found["early"] = [box.delivered.get(timeout=LIMIT_S).microbatch]
        found["late"] = [] if box.delivered.empty() else [box.delivered.get().microbatch]
    meet("caught up")
    transport.close()
    transport.open(2, box.mailbox, VariabilityModel())
    if index == 0:
        give_up_while_sending(transport, post, box, [bundle(n, put(np.ones(3))) for n in (8, 9)])
    else:
        transport.close()
        transport.open(3, box.mailbox, VariabilityModel())
    if index == 0:
        send(transport, post, None, bundle(10, put(np.ones(3))))
    if index == 1:
        found["after one that was given up"] = box.delivered.get(timeout=LIMIT_S).microbatch
    other = ArrayMover(job.post)
    meet("the end")
    found["at the end"] = box.delivered.qsize()
    transport.close()
    found["moved"] = moved(mover, index)
    found["moved by another"] = moved(other, index)
    if index == 2:
        found["never sent"] = why_it_did_not_come(mover)
    found["unequal"] = sent_between_unequal_meshes(job.post, meet)
    return found


def give_up_while_sending(transport, post, box, bundles):
    """Closes a step and opens the next one while the sender is held up with a bundle."""
    sender = transport._threads[0]
    post.fault = "wait"
    for each in bundles:
        transport.send(each)
    network._JOIN_TIMEOUT_S = 0.1
    transport.close()
    assert sender.is_alive()
    transport.open(3, box.mailbox, VariabilityModel())
    post.gate.set()
    sender.join(LIMIT_S)
    post.fault = None


def sent_between_unequal_meshes(post, meet):
    """From rows over the processes 0 and 1 to columns over 1 and 2, by a transport of its own."""
    devices = np.empty(4, object)
    devices[:] = [jax.devices()[n] for n in (0, 1, 1, 2)]
    topology = Topology(devices=devices.reshape(1, 2, 2, 1))
    specs = PartitionSpec("data"), PartitionSpec(None, "data")

    def layout(replica, stage, shape):
        return NamedSharding(topology.group(replica, stage).mesh, specs[stage])

    box, values = Box(), np.arange(24, dtype=np.int32).reshape(4, 6)
    transport = NetworkTransport(post, topology, layout)
    meet("made another")
    transport.open(0, box.mailbox, VariabilityModel())
    if post.process_index < 2:
        array = jax.make_array_from_callback((4, 6), layout(0, 0, (4, 6)), lambda i: values[i])
        transport.send(bundle(0, array))
    part = None
    if post.process_index > 0:
        (array,) = box.delivered.get(timeout=LIMIT_S).arrays
        (shard,) = array.addressable_shards
        part = np.asarray(shard.data).tolist()
    meet("unequal")
    transport.close()
    return part


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
        target=transport._send_all,
        args=(transport._epoch, transport._outgoing, mailbox),
        daemon=True,
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


def why_it_did_not_come(mover):
    """What is said of a move that the process with the array has forgotten."""
    first, last = jax.devices()[0], jax.devices()[2]
    try:
        mover.move(
            "an array",
            None,
            shape=(10,),
            dtype=np.dtype(np.int32),
            source=SingleDeviceSharding(first),
            target=SingleDeviceSharding(last),
            timeout_s=0.2,
        )
    except PeerLostError as error:
        return [error.process, str(error)]
    return None


if __name__ == "__main__":
    main()
