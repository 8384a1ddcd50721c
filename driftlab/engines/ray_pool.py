"""Jobs on a Ray cluster: the same contract as ``pool.run_jobs``, on several machines.

Ray is an optional extra (``pip install driftlab[ray]``). Jobs and results travel by files, so
every machine needs driftlab installed, and must see the run and its cache under the same paths.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from driftlab.engines.pool import Job, Progress, understood
from driftlab.errors import ConfigError, DriftlabError, ResourceError, RunError

LOCAL = "local"
_RETRIES = 3  # of a job whose worker died
_POLL = 0.5  # seconds between two looks at the progress
_PATIENCE = 10.0  # seconds until a machine that does not answer is not there


def found_ray(address: str) -> Any:
    """The library. Raises ConfigError when it is not installed, or ``address`` is empty."""
    if not address:
        raise ConfigError("--ray names no cluster", remedy="Give its address, or local.")
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "Ray is not installed", remedy="pip install 'driftlab[ray]', on every machine."
        ) from None
    return ray


def run_jobs_on_ray(
    jobs: Mapping[str, Job],
    work: Callable[[Job, Progress], None],
    *,
    address: str,
    workers: int,
    threads: int = 1,
    on_step: Progress = lambda steps: None,
) -> dict[str, DriftlabError]:
    """Call ``work(job, progress)`` for every job somewhere on the cluster. Returns what failed.

    Parameters
    ----------
    address: of a running cluster (``host:port``, ``auto``), or ``local`` for one that is started
        here with room for ``workers`` jobs and ends with the call.
    threads: cores that a job takes. On a cluster as many jobs run at once as have room.

    A job whose worker is killed is done again, up to three times.

    Raises
    ------
    ConfigError: Ray is not installed, or no cluster answers at ``address``.
    ResourceError: of a job. The others would meet it too, so they are ended.
    RunError: a job could not begin on its worker, or the worker died again and again.
    """
    ray = found_ray(address)
    _connect(ray, address, cores=workers * threads)
    try:
        board = ray.remote(_Board).options(num_cpus=0).remote()
        remote = ray.remote(_serve).options(num_cpus=threads, max_retries=_RETRIES)
        running = {remote.remote(work, name, job, board): name for name, job in jobs.items()}
        failed: dict[str, DriftlabError] = {}
        shown = 0
        while running:
            ready, _ = ray.wait(list(running), num_returns=1, timeout=_POLL)
            for done in ready:
                name = running.pop(done)
                error = _outcome(ray, done, name)
                if isinstance(error, ResourceError):
                    for task in running:
                        ray.cancel(task, force=True)
                    raise error
                if error is not None:
                    failed[name] = error
            steps = ray.get(board.total.remote())
            on_step(max(0, steps - shown))  # a job that is done again starts from what it kept
            shown = max(shown, steps)
        return failed
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str, *, cores: int) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    # Waiting threads must not spin: they take the core that another worker needs.
    environment = {"env_vars": {"OMP_WAIT_POLICY": "passive"}}
    try:
        _knock(address)
        if address == LOCAL:
            ray.init(
                address=LOCAL,
                num_cpus=cores,
                include_dashboard=False,
                runtime_env=environment,
                **quiet,
            )
        else:
            ray.init(address=address, runtime_env=environment, **quiet)
    except Exception as error:  # a start that takes too long is a bare Exception
        raise ConfigError(
            f"no Ray cluster answers at {address}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            remedy="Start one (ray start --head), or use --ray local.",
        ) from None


def _knock(address: str) -> None:
    """Raise OSError when nobody listens at ``host:port``: Ray itself waits for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()


def _outcome(ray: Any, done: Any, name: str) -> DriftlabError | None:
    try:
        error: DriftlabError | None = ray.get(done)
    except ray.exceptions.OutOfMemoryError as lack:
        return ResourceError(
            f"not enough memory for cell {name}",
            got=str(lack).splitlines()[0],
            remedy="Use fewer workers or a smaller batch; finished work is kept.",
        )
    except ray.exceptions.RayTaskError as stopped:
        raise RunError(
            f"cell {name} could not begin on its worker",
            got=(str(stopped.cause).strip().splitlines() or [type(stopped.cause).__name__])[-1],
            remedy="Install the same driftlab on every machine of the cluster.",
        ) from None
    except ray.exceptions.RayError as lost:
        raise RunError(
            f"the worker of cell {name} died {_RETRIES + 1} times",
            got=type(lost).__name__,
            remedy="Look at that machine. The same command goes on from what is finished.",
        ) from None
    return error


class _Board:
    """Steps done by each job."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def put(self, job: str, steps: int) -> None:
        self._steps[job] = steps

    def total(self) -> int:
        return sum(self._steps.values())


def _serve(
    work: Callable[[Job, Progress], None], name: str, job: Job, board: Any
) -> DriftlabError | None:
    """What runs on a worker: an error is handed back, so that Ray retries deaths only."""
    steps, last = 0, 0.0

    def progress(n: int) -> None:
        nonlocal steps, last
        steps += n
        if time.monotonic() - last >= _POLL:
            board.put.remote(name, steps)
            last = time.monotonic()

    outcome: DriftlabError | None = None
    try:
        work(job, progress)
    except Exception as error:
        found = understood(error)
        got = None if found.got is None else str(found.got)  # whatever it was can travel
        outcome = type(found)(found.what, got=got, remedy=found.remedy)
    import ray

    ray.get(board.put.remote(name, steps))
    return outcome
