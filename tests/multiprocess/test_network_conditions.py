"""Training over a network that delays, shuffles and loses packets, and over one that breaks.

Each process has a network namespace of its own, as if on a host of its own; a bridge in
another one joins them. Nothing of the machine's own network is touched.
"""

import contextlib
import json
import os
import shutil
import subprocess

import pytest
from support.processes import ROOT, alone, job, wait_all

SCRIPT = str(ROOT / "tests" / "support" / "toy_job.py")
LIMIT_S = 120.0
COUNT = 3
PREFIX = f"rrfp{os.getpid()}"
SETTINGS = {"axes": {"stage": COUNT}, "stages": COUNT, "steps": 2, "peer_timeout_s": 6.0}


def call(*command):
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def names():
    return [f"{PREFIX}-{i}" for i in range(COUNT)]


# What becomes of packets. The second one drops those that do not fit a short queue, so it
# loses and delays them as a busy link does; some kernels have it alone.
CONDITIONS = {
    "delay, jitter, loss": "netem delay 8ms 4ms loss 1%",
    "a narrow link": "tbf rate 40mbit burst 16kb latency 4ms",
}


def is_root_with(*programs):
    return os.geteuid() == 0 and all(map(shutil.which, programs))


pytestmark = pytest.mark.skipif(
    not is_root_with("ip"), reason="needs root and ip, to make network namespaces"
)


@pytest.fixture(scope="module")
def hosts():
    """Namespaces 10.77.0.1 to 10.77.0.3, joined by a bridge."""
    hub = f"{PREFIX}-hub"
    with contextlib.ExitStack() as stack:
        for name in (hub, *names()):
            call("ip", "netns", "add", name)
            stack.callback(
                subprocess.run, ["ip", "netns", "del", name], capture_output=True, timeout=20
            )
        call("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        call("ip", "-n", hub, "link", "set", "bridge0", "up")
        for i, name in enumerate(names(), start=1):
            peer = ("peer", "name", "eth0", "netns", name)
            call("ip", "-n", hub, "link", "add", f"port{i}", "type", "veth", *peer)
            call("ip", "-n", hub, "link", "set", f"port{i}", "master", "bridge0", "up")
            call("ip", "-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            call("ip", "-n", name, "link", "set", "eth0", "up")
            call("ip", "-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names()]


def make_conditions(condition):
    """Puts every host's link under a condition; skips where the kernel cannot."""
    if not shutil.which("tc"):
        pytest.skip("needs tc")
    for name in names():
        change = ["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root"]
        done = subprocess.run(
            [*change, *condition.split()], capture_output=True, text=True, timeout=20
        )
        if done.returncode:
            pytest.skip(f"this kernel has no {condition.split()[0]}: {done.stderr.strip()}")


def train(hosts, **settings):
    arguments = [SCRIPT, json.dumps(SETTINGS | settings)]
    return job(COUNT, arguments, host="10.77.0.1", port=6789, inside=hosts)


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_a_bad_network_changes_no_bit(hosts, condition):
    make_conditions(condition)
    with train(hosts) as processes:
        codes = wait_all(processes, LIMIT_S)
        assert codes == [0] * COUNT, "\n".join(p.output for p in processes)
        digests = {json.loads(p.output.splitlines()[-1])["digest"] for p in processes}
    with alone([SCRIPT, json.dumps(SETTINGS)], devices=COUNT) as process:
        assert process.wait(LIMIT_S) == 0, process.output
        assert digests == {json.loads(process.output.splitlines()[-1])["digest"]}


def test_a_host_that_is_cut_off_is_named_by_the_others_within_the_timeout(hosts):
    """No packet says that a connection has ended: there are only packets that do not come."""
    with train(hosts, steps=10**6) as processes:
        processes[0].wait_for("training begins", LIMIT_S)
        call("ip", "-n", names()[2], "link", "set", "eth0", "down")
        for process in processes[:2]:
            assert process.wait(30.0) == 75, process.output
            assert "process 2 was lost" in process.output
