"""Jobs on a local Ray cluster: the pool's contract, and a killed worker's job done again.

Ray is an optional extra; without it these tests are skipped. Starting a cluster takes seconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pool_jobs
import pytest
import small

from driftlab.engines.pool import run_jobs
from driftlab.engines.ray_pool import LOCAL, run_jobs_on_ray
from driftlab.errors import ConfigError, NumericsError, ResourceError
from driftlab.experiment import run_experiment


def jobs(folder: Path, *hows: str) -> dict[str, tuple[str, Path]]:
    folder.mkdir()
    return {f"{how}-{i}": (how, folder / str(i)) for i, how in enumerate(hows)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own, about sockets and processes
def test_a_killed_workers_job_is_done_again_and_failures_equal_the_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    here = str(Path(__file__).parent)  # the workers must find pool_jobs
    monkeypatch.setenv("PYTHONPATH", here, prepend=os.pathsep)
    steps: list[int] = []
    hows = ("fine", "inf", "killed once", "bug")
    ours = run_jobs_on_ray(
        jobs(tmp_path / "ray", *hows),
        pool_jobs.work,
        address=LOCAL,
        workers=2,
        on_step=steps.append,
    )
    serial = run_jobs(
        jobs(tmp_path / "pool", "fine", "inf", "fine", "bug"), pool_jobs.work, workers=1
    )
    assert sum(steps) == 7 + 3 + 7 + 3
    assert {type(e) for e in ours.values()} == {type(e) for e in serial.values()}
    assert isinstance(ours["inf-1"], NumericsError)
    assert ours["inf-1"].cause == serial["inf-1"].cause
    assert set(ours) == {"inf-1", "bug-3"}
    lives = (tmp_path / "ray" / "2").read_text().split()
    assert len(set(lives)) == 2, "one worker was killed, another one did the job"

    with pytest.raises(ResourceError, match="no space left"):
        run_jobs_on_ray(
            jobs(tmp_path / "full", "full", "slow"), pool_jobs.work, address=LOCAL, workers=2
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_ablation_on_ray_has_the_serial_runs_bytes() -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    out = small.home() / "ray"
    with small.shrunk():
        run_experiment(small.spec(), out, quiet=True, ray=LOCAL)
    assert small.contents(out) == small.contents(small.home() / "done")
    assert small.drafters(out) == small.drafters(small.home() / "done")


def test_a_cluster_that_is_not_there_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # it is never reached
    with pytest.raises(ConfigError, match="no Ray cluster answers"):
        run_jobs_on_ray(
            jobs(tmp_path / "nowhere", "fine"), pool_jobs.work, address="127.0.0.1:1", workers=1
        )


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed") as info:
        run_jobs_on_ray(jobs(tmp_path / "x", "fine"), pool_jobs.work, address=LOCAL, workers=1)
    assert "driftlab[ray]" in str(info.value.remedy)
    for address, said in ((LOCAL, "Ray is not installed"), ("", "names no cluster")):
        with pytest.raises(ConfigError, match=said):
            run_experiment(small.spec(), tmp_path / "run", ray=address)
    assert not (tmp_path / "run").exists()
