"""Starts the processes of a job, and ends them in good order.

    with start_job() as job:
        pipeline = Pipeline(..., job=job)

In one process nothing is started. In several, they meet (`rrfp_jax.job.rendezvous`),
`jax.distributed` is initialised, and the post between them is opened. Left without an error,
the block waits for the others, so that nobody is taken for dead; left with one, it tells
them and waits for nobody, and the process's exit code says whether another try may help.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import ipaddress
import logging
import os
import platform
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import jax

from rrfp_jax.job.coordination import CoordinationService, initialize
from rrfp_jax.job.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RETRY, JobError, lost_process
from rrfp_jax.job.launcher import LaunchPlan, plan_launch
from rrfp_jax.job.post import Post
from rrfp_jax.job.rendezvous import rendezvous
from rrfp_jax.job.sockets import PostOptions
from rrfp_jax.job.store import JobStore

_log = logging.getLogger("rrfp_jax")

# How long a process that is done waits for the others to be done.
_END_TIMEOUT_S = 60.0
# How long process 0, when it fails, stays for the others to leave: the coordination service
# may end with it then, and otherwise lingers.
_DEPARTURE_S = 3.0
# How long a process may go on after another one was lost. It ends by itself wherever it
# waits for others; this is for compiling, and for collectives that never come back.
# Shorter than the coordination service of a dead process 0 lingers.
_GRACE_S = 6.0


class _Watch:
    """Ends the process when it does not end by itself after another one was lost."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._is_over = False

    def begin(self, error: JobError) -> None:
        """Somebody was lost, or has given up."""
        with self._lock:
            if not self._is_over and self._timer is None:
                self._timer = threading.Timer(_GRACE_S, self._end, [error])
                self._timer.daemon = True
                self._timer.start()

    def cancel(self) -> None:
        """The process is ending."""
        with self._lock:
            self._is_over = True
            if self._timer is not None:
                self._timer.cancel()

    def _end(self, error: JobError) -> None:
        # The main thread is inside the compiler or a collective, where nothing reaches it.
        print(f"{error} (ended {_GRACE_S:g} s later)", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED if lost_process(error) is None else EXIT_RETRY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The processes that train together, seen from one of them.

    Attributes:
      process_index: Of this process.
      num_processes: Of the job.
      run_id: The same in all of them, new for each start; empty for one process.
      post: The messages between them; None for one process.
      watch: Ends this process some time after another one was lost.
      service: jax's coordination service, which process 0 has started.
    """

    process_index: int = 0
    num_processes: int = 1
    run_id: str = ""
    post: Post | None = None
    watch: _Watch | None = None
    service: CoordinationService | None = None

    def __enter__(self) -> Self:
        """Nothing: the job has been started."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the job: together, or by telling the others why not.

        Raises:
          JobError: A process was lost while the others waited for it to be done.
        """
        if self.post is None:
            return
        if error is not None:
            self._leave_alone(self.post, error)
            return
        try:
            self._leave_together(self.post)
        except BaseException as failure:
            self._leave_alone(self.post, failure)
            raise

    def _leave_together(self, post: Post) -> None:
        post.gather("the end of the job", b"", _END_TIMEOUT_S)
        # The post looks after the others until jax has let go: this waits for them as well.
        jax.distributed.shutdown()
        self._end_watch()
        post.close()
        if self.service is not None:
            self.service.close()

    def _leave_alone(self, post: Post, error: BaseException) -> None:
        self._end_watch()
        words = str(error) or type(error).__name__
        post.abort(words, lost_process(error))
        # At the end of the process jax would wait for the others, some of whom may be dead.
        atexit.register(_end_at_once, _exit_code(error))
        all_left = self.service is not None and post.wait_for_departures(_DEPARTURE_S)
        post.close()
        if self.service is not None and all_left:
            self.service.leave()

    def _end_watch(self) -> None:
        if self.watch is not None:
            self.watch.cancel()


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_FAILED if lost_process(error) is None else EXIT_RETRY


def _end_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_job(
    plan: LaunchPlan | None = None,
    options: PostOptions | None = None,
    facts: Mapping[str, str] | None = None,
) -> Job:
    """Starts this process's part of a job. Before anything else of jax is used.

    Args:
      plan: Which process this is; by default what the launcher's variables say.
      options: How the processes talk.
      facts: What has to be the same in all of them, beside the versions of jax.

    Raises:
      JobError: A process is missing or does not fit, or a port cannot be had.
      ValueError: The launcher's variables make no sense.
    """
    plan = plan_launch(os.environ) if plan is None else plan
    options = options or PostOptions()
    if plan.num_processes == 1:
        return Job()
    host, port = plan.address
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # jax's own watch is slower than ours by far, and ends processes without a word.
    heartbeat_timeout_s = max(100, int(3 * options.peer_timeout_s))
    with contextlib.ExitStack() as stack:
        service = None
        if plan.process_index == 0:
            service = stack.enter_context(
                CoordinationService(address, plan.num_processes, heartbeat_timeout_s)
            )
        run_id = rendezvous(plan, {**_versions(), **(facts or {})}, options.start_timeout_s)
        if service is not None:
            service.begin(options.start_timeout_s)
        initialize(
            address,
            plan.num_processes,
            plan.process_index,
            timeout_s=options.start_timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        post = Post.open(
            process_index=plan.process_index,
            num_processes=plan.num_processes,
            host=reachable_host(host, port),
            store=JobStore(f"rrfp/{run_id}"),
            options=options,
        )
    watch = _Watch()
    post.on_loss(watch.begin)
    return Job(
        process_index=plan.process_index,
        num_processes=plan.num_processes,
        run_id=run_id,
        post=post,
        watch=watch,
        service=service,
    )


def reachable_host(coordinator_host: str, port: int) -> str:
    """The address of this process on the network on which the coordinator is."""
    family, _, _, _, address = socket.getaddrinfo(coordinator_host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # chooses a route; sends nothing
        host: str = probe.getsockname()[0]
    return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host


def _versions() -> dict[str, str]:
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }
