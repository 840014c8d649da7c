"""The runner's folder on the local disk, also of runners that were killed."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from airflow_vllm_batch.runner.spool import PREFIX, open_spool, sweep


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def later() -> float:
    return time.time() + 3600


def test_a_spool_is_empty_and_gone_afterwards(scratch: Path) -> None:
    with open_spool() as spool:
        assert list(spool.iterdir()) == []
        (spool / "input.jsonl").write_text("rows")
    assert list(scratch.iterdir()) == []


def test_what_a_killed_runner_left_is_swept_away_and_what_lives_is_not(scratch: Path) -> None:
    dead = scratch / f"{PREFIX}dead"
    (dead / "files").mkdir(parents=True)
    (dead / "files" / "input.jsonl").write_text("rows")
    (dead / "owner.lock").touch()
    other = scratch / "somebody-elses"
    other.mkdir()
    with open_spool() as alive:
        assert sweep(scratch, now=later()) == [dead]
        assert alive.exists()
    assert list(scratch.iterdir()) == [other]


def test_a_folder_that_was_just_made_is_left_alone(scratch: Path) -> None:
    young = scratch / f"{PREFIX}young"
    young.mkdir()
    assert sweep(scratch) == []
    assert young.exists()
