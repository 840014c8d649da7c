"""Real vLLM on the CPU, with the small models that ``make setup`` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import ROOT

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENGINE_FLAGS = ("--enforce-eager", "--max-model-len", "512", "--gpu-memory-utilization", "0.3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(900))


def model(name: str) -> str:
    path = ROOT / ".models" / name
    assert (path / "config.json").exists(), f"{path} is not there: run make setup"
    return str(path)


@pytest.fixture(scope="session")
def smollm() -> str:
    """SmolLM2-135M-Instruct: small enough for a CPU, large enough to know the capital of France."""
    return model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tiny_llama() -> str:
    """A random Llama of two layers: loads fast, says nothing."""
    return model("tiny-llama")


@pytest.fixture(scope="session")
def minilm() -> str:
    """all-MiniLM-L6-v2: sentence embeddings of 384 numbers."""
    return model("all-minilm-l6-v2")
