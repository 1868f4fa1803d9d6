"""Strangers at every port on which the processes of a job listen, while they train."""

import json
import os
import pickle
import socket
import struct

import psutil
from support.processes import ROOT, alone, job, wait_all

SCRIPT = str(ROOT / "tests" / "support" / "toy_job.py")
LIMIT_S = 120.0
SETTINGS = {"axes": {"stage": 2, "tensor": 2}, "steps": 8}
MOST_GROWTH_BYTES = 100 << 20


class Makes:
    """Pickled, it makes a folder when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def family(processes):
    """The processes of a job, and those that they have started."""
    own = [psutil.Process(process.pid) for process in processes]
    return [*own, *(child for process in own for child in process.children(recursive=True))]


def listening(members):
    return sorted(
        {
            connection.laddr.port
            for member in members
            for connection in member.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    )


def test_garbage_at_every_port_changes_nothing(tmp_path):
    target = tmp_path / "made by a pickle"
    words = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(1 << 16),
        pickle.dumps(Makes(target)),
        b"\xff" + bytes(8) + b"\x7f" + b"\x02" + struct.pack(">Q", 1 << 40) + bytes(64),
        b"",  # says nothing, and stays
    ]
    strangers = []
    with job(4, [SCRIPT, json.dumps(SETTINGS | {"pause_s": 0.5})]) as processes:
        for process in processes:
            process.wait_for("training begins", LIMIT_S)
        members = family(processes)
        before = {member.pid: member.memory_info().rss for member in members}
        ports = listening(members)
        assert len(ports) >= 5, "four posts and the coordinator"
        for port in ports:
            for word in words:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=5.0)
                strangers.append(stranger)
                try:
                    stranger.sendall(word)
                except ConnectionError:
                    continue  # shown the door before it had finished
        processes[0].wait_for("half of the steps", LIMIT_S)
        for member in members:
            assert member.memory_info().rss - before[member.pid] < MOST_GROWTH_BYTES
        assert wait_all(processes, LIMIT_S) == [0] * 4, processes[0].output
        digests = {json.loads(p.output.splitlines()[-1])["digest"] for p in processes}
    for stranger in strangers:
        stranger.close()
    assert not target.exists()
    assert any("a connection of a stranger" in process.output for process in processes)
    with alone([SCRIPT, json.dumps(SETTINGS)], devices=4) as process:
        assert process.wait(LIMIT_S) == 0, process.output
        assert digests == {json.loads(process.output.splitlines()[-1])["digest"]}
