"""Models and adapters of object storage on the local disk: once, whole, and under their fingerprint."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from airflow_vllm_batch.contract import BatchSpec, EngineSpec, InputFile, ModelSpec, OutputTarget
from airflow_vllm_batch.contract.spec import Adapter
from airflow_vllm_batch.runner.engine.vllm_engine import argv_of
from airflow_vllm_batch.runner.errors import EngineStartError, LocalDiskError
from airflow_vllm_batch.runner.model_cache import MARKER, Copy, Fetcher, local_names, look_at, look_up
from airflow_vllm_batch.storage.access import Access
from airflow_vllm_batch.storage.base import ObjectInfo, ObjectNameError, StateRefusedError, StateUnreadableError, Store
from airflow_vllm_batch.storage.local import LocalStore
from airflow_vllm_batch.storage.memory import MemoryStore
from airflow_vllm_batch.storage.model_objects import MODEL_CONFIGS, fingerprinted, open_weights
from airflow_vllm_batch.storage.settings import GcsSettings, S3Settings, StoreFile, StoreSettingsError, write_store_file
from tests.support.commands import vllm_batch
from tests.support.runs import chat, write_lines
from tests.support.seaweed import SeaweedServer

URI = "s3://b/llama/"
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 3_000_000, "sub/tokenizer.json": b"t" * 10, "empty": b""}
READ_ONCE = {"config.json": 1, "model.safetensors": 1, "sub/tokenizer.json": 1}


class ModelStore(MemoryStore):
    """Counts reads, and can stop in the middle of a file."""

    def __init__(self) -> None:
        super().__init__(URI)
        self.read: Counter[str] = Counter()
        self.dies_in: str | None = None
        self.hold: asyncio.Event | None = None
        self.reading = asyncio.Event()

    async def stream(self, name: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        self.read[name] += 1
        async for chunk in super().stream(name, etag=etag):
            yield chunk
            self.reading.set()
            if self.hold is not None:
                await self.hold.wait()
            if name == self.dies_in:
                raise KilledError


class KilledError(Exception):
    """Ends a fetch as a kill does: nothing is tidied up."""


class Notes(list[str]):
    def add(self, words: str) -> None:
        self.append(words)


def fetcher(notes: Notes | None = None) -> Fetcher:
    said = Notes() if notes is None else notes
    ticks = iter(range(0, 10**9, 10))  # every look at the clock is worth a word
    return Fetcher(said.add, clock=lambda: float(next(ticks)), look_again_seconds=0.0)


async def filled(store: Store, files: dict[str, bytes] = FILES) -> None:
    for name, data in files.items():
        await store.put(name, data)


async def look(store: Store, root: Path) -> Copy:
    return await look_at(store, URI, MODEL_CONFIGS, root)


def there(copy: Copy) -> dict[str, bytes]:
    return {
        path.relative_to(copy.folder).as_posix(): path.read_bytes()
        for path in copy.folder.rglob("*")
        if path.is_file() and path.name != MARKER
    }


async def test_a_model_is_fetched_once(tmp_path: Path) -> None:
    store = ModelStore()
    await filled(store)
    copy = await look(store, tmp_path)
    assert (copy.fingerprint, copy.folder) == (f"store:{copy.folder.name}", tmp_path / copy.folder.name)
    notes = Notes()
    await fetcher(notes).bring(copy)
    await fetcher().bring(await look(store, tmp_path))
    assert there(copy) == FILES
    assert store.read == READ_ONCE
    assert json.loads((copy.folder / MARKER).read_text()) == {
        "uri": URI,
        "fingerprint": copy.fingerprint,
        "files": {"config.json": 2, "empty": 0, "model.safetensors": 3_000_000, "sub/tokenizer.json": 10},
    }
    assert "fetching s3://b/llama/: 0.00 of 0.00 GiB" in notes
    assert notes[-1] == "s3://b/llama/ is here: 0.00 GiB"


async def test_a_complete_copy_is_used_while_storage_is_away(tmp_path: Path) -> None:
    class Away(ModelStore):
        async def before(self, operation: str, name: str) -> None:
            if operation in {"head", "stream", "get"}:
                raise StateUnreadableError("away")

    store, away = ModelStore(), Away()
    await filled(store)
    await filled(away)
    await fetcher().bring(await look(store, tmp_path))
    await fetcher().bring(await look(away, tmp_path))


async def test_a_fetch_that_was_killed_in_mid_file_goes_on_with_the_files_it_has_not(tmp_path: Path) -> None:
    store = ModelStore()
    await filled(store)
    copy = await look(store, tmp_path)
    await fetcher().bring(copy)
    (copy.folder / MARKER).unlink()
    (copy.folder / "model.safetensors").unlink()
    store.dies_in = "model.safetensors"
    with pytest.raises(KilledError):
        await fetcher().bring(copy)
    assert not (copy.folder / MARKER).exists()
    assert not (copy.folder / "model.safetensors").exists()
    store.dies_in = None
    await fetcher().bring(copy)
    assert store.read == {"config.json": 1, "model.safetensors": 3, "sub/tokenizer.json": 1}
    assert there(copy) == FILES


async def test_the_marker_is_written_last(tmp_path: Path) -> None:
    store = ModelStore()
    store.hold = asyncio.Event()
    await filled(store)
    copy = await look(store, tmp_path)
    fetching = asyncio.ensure_future(fetcher().bring(copy))
    await store.reading.wait()
    assert not (copy.folder / MARKER).exists()
    store.hold.set()
    await fetching
    assert (copy.folder / MARKER).exists()


async def test_of_two_runners_at_once_one_fetches_and_the_other_waits(tmp_path: Path) -> None:
    store = ModelStore()
    store.hold = asyncio.Event()
    await filled(store)
    copy = await look(store, tmp_path)
    first = asyncio.ensure_future(fetcher().bring(copy))
    await store.reading.wait()
    waiting = asyncio.Event()
    second = asyncio.ensure_future(Fetcher(lambda words: waiting.set(), look_again_seconds=0.0).bring(copy))
    await waiting.wait()
    store.hold.set()
    await asyncio.gather(first, second)
    assert store.read == READ_ONCE


async def test_a_stop_ends_the_wait_for_another_process(tmp_path: Path) -> None:
    store = ModelStore()
    store.hold = asyncio.Event()
    await filled(store)
    copy = await look(store, tmp_path)
    first = asyncio.ensure_future(fetcher().bring(copy))
    await store.reading.wait()
    said: asyncio.Queue[str] = asyncio.Queue()
    second = asyncio.ensure_future(Fetcher(said.put_nowait, look_again_seconds=0.0).bring(copy))
    assert await said.get() == "waiting for another process that fetches the model: 0.00 GiB so far"
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    store.hold.set()
    await first


async def test_a_model_that_is_overwritten_in_place_is_another_model(tmp_path: Path) -> None:
    store = ModelStore()
    await filled(store)
    before = await look(store, tmp_path)
    await fetcher().bring(before)
    await store.put("model.safetensors", b"v" * 3_000_000)
    after = await look(store, tmp_path)
    await fetcher().bring(after)
    assert after.folder != before.folder
    assert (there(before)["model.safetensors"][:1], there(after)["model.safetensors"][:1]) == (b"w", b"v")


async def test_a_model_that_is_replaced_while_it_is_fetched_is_tried_again(tmp_path: Path) -> None:
    store = ModelStore()
    await filled(store)
    copy = await look(store, tmp_path)
    await store.put("config.json", b"[]")
    with pytest.raises(EngineStartError, match="was replaced while it was fetched") as raised:
        await fetcher().bring(copy)
    assert raised.value.exit_code == 75


async def test_a_folder_without_a_configuration_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    store = ModelStore()
    await filled(store, {"deeper/config.json": b"{}", "model.safetensors": b"w"})
    with pytest.raises(EngineStartError, match=r"model 's3://b/llama/' has no config\.json") as raised:
        await look(store, tmp_path)
    assert raised.value.exit_code == 78
    assert list(tmp_path.iterdir()) == []


async def test_an_adapter_needs_its_own_configuration(tmp_path: Path) -> None:
    store = ModelStore()
    await filled(store)
    with pytest.raises(EngineStartError, match=r"adapter 's3://b/llama/' has no adapter_config\.json"):
        await look_at(store, URI, ("adapter_config.json",), tmp_path)


@pytest.mark.parametrize("name", ["../config.json", "/etc/config.json", "a/../../b", "a//b", ".vllm-batch-complete"])
async def test_an_object_whose_name_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    class Odd(ModelStore):
        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            yield ObjectInfo("config.json", 2, '"1"', None)
            yield ObjectInfo(name, 2, '"2"', None)

    with pytest.raises(ObjectNameError):
        await look(Odd(), tmp_path)


async def test_an_object_that_is_a_folder_too_is_refused(tmp_path: Path) -> None:
    store = ModelStore()
    await filled(store, {"config.json": b"{}", "sub": b"x", "sub/weights": b"w"})
    with pytest.raises(ObjectNameError, match="'s3://b/llama/sub' is an object and a folder of objects"):
        await look(store, tmp_path)


async def test_a_disk_without_room_is_said_before_the_first_byte(tmp_path: Path) -> None:
    class Huge(ModelStore):
        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            yield ObjectInfo("config.json", 2**60, '"1"', None)

    store = Huge()
    with pytest.raises(LocalDiskError, match=r"needs 1073741824\.0 GiB") as raised:
        await fetcher().bring(await look(store, tmp_path))
    assert (raised.value.exit_code, store.read) == (74, {})


async def test_a_cache_folder_that_can_not_be_written_is_a_fault_of_the_disk(tmp_path: Path) -> None:
    store = ModelStore()
    await filled(store)
    (tmp_path / "file").touch()
    with pytest.raises(LocalDiskError, match="VLLM_BATCH_MODEL_CACHE"):
        await fetcher().bring(await look(store, tmp_path / "file"))


async def test_a_store_that_forbids_reading_is_believed_at_once(tmp_path: Path) -> None:
    class Forbidden(ModelStore):
        async def before(self, operation: str, name: str) -> None:
            if operation == "stream":
                raise StateRefusedError("permission denied")

    store = Forbidden()
    await filled(store)
    with pytest.raises(StateRefusedError):
        await fetcher().bring(await look(store, tmp_path))


async def test_an_empty_folder_is_a_fault_of_storage(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no object below s3://b/llama/"):
        await look(ModelStore(), tmp_path)


async def test_a_local_folder_is_copied_like_any_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "source")
    await filled(store)
    copy = await look(store, tmp_path / "cache")
    await fetcher().bring(copy)
    assert there(copy) == FILES


def spec(**model: object) -> BatchSpec:
    return BatchSpec(
        run_key="a",
        inputs=(InputFile(uri="in.jsonl"),),
        output=OutputTarget(uri="out/", state_uri="out/"),
        model=ModelSpec.model_validate({"name": URI, **model}),
    )


def copy_at(uri: str, folder: str) -> Copy:
    return Copy(uri, MemoryStore(uri), (), "store:0", Path(folder))


def test_the_engine_loads_folders_and_rows_name_what_the_user_wrote() -> None:
    model = ModelSpec(name=URI, adapters=(Adapter(name="law", uri="s3://b/law"), Adapter(name="own", uri="/own")))
    copies = {URI: copy_at(URI, "/cache/1"), "s3://b/law": copy_at("s3://b/law", "/cache/2")}
    modules = ["law=s3://b/law", {"name": "own", "path": "/own", "base_model_name": "x"}]
    local, args = local_names(model, {"lora_modules": list(modules), "max_lora_rank": 8}, copies)
    assert argv_of(local, args) == [
        *("--model", "/cache/1", "--served-model-name", "s3://b/llama/", "--lora-modules", "law=/cache/2"),
        *('{"name": "own", "path": "/own", "base_model_name": "x"}', "--max-lora-rank=8", "--enable-lora"),
    ]
    assert local.accepted_names == ("s3://b/llama/", "law", "own")


def test_names_that_the_user_gave_the_model_stay() -> None:
    local, _ = local_names(ModelSpec(name=URI, served_names=("llama",)), {}, {URI: copy_at(URI, "/cache/1")})
    assert (local.name, local.served_names) == ("/cache/1", ("llama",))
    hub = ModelSpec(name="org/model")
    assert local_names(hub, {}, {}) == (hub, {})


def test_the_model_is_opened_by_its_own_entry_else_by_that_of_the_input() -> None:
    s3 = S3Settings(anonymous=True)
    for stores in ({"model": s3}, {"input": s3}):
        assert open_weights(Access.from_document(StoreFile(stores=stores)), spec(), URI).uri("x") == "s3://b/llama/x"
    other = Access.from_document(StoreFile(stores={"input": GcsSettings(anonymous=True)}))
    with pytest.raises(StoreSettingsError, match="the store file has no store 'model'"):
        open_weights(other, spec(), URI)
    with pytest.raises(ObjectNameError, match="names no bucket"):
        open_weights(other, spec(), "s3:///llama")


async def test_an_echo_and_a_hub_model_ask_no_store(tmp_path: Path) -> None:
    access = Access.from_document(StoreFile())
    echo = spec().model_copy(update={"engine": EngineSpec(kind="echo")})
    assert await look_up(echo, access, tmp_path) == {}
    assert await look_up(spec(name="org/model"), access, tmp_path) == {}


@pytest.mark.s3
async def test_a_model_in_a_real_bucket_is_fetched_and_known_by_its_etags(
    tmp_path: Path, s3_server: SeaweedServer
) -> None:
    prefix = uuid.uuid4().hex
    store = s3_server.open_folder("tests", prefix)
    await filled(store)
    for folder in ("sub/", "nothing/"):  # as consoles put them
        s3_server.put_raw("tests", f"{prefix}/{folder}", b"")
    access = Access.from_document(StoreFile(stores={"model": s3_server.settings()}))
    named = spec(name=f"s3://tests/{prefix}")
    copies = await look_up(named, access, tmp_path)
    copy = copies[f"s3://tests/{prefix}"]
    await fetcher().bring_all(copies.values())
    assert there(copy) == {**FILES, "nothing": b""}
    assert (await fingerprinted(named, access)).model.fingerprint == copy.fingerprint
    await store.put("config.json", b"[]")
    assert (await fingerprinted(named, access)).model.fingerprint != copy.fingerprint


@pytest.mark.s3
@pytest.mark.parametrize(
    ("model", "keys", "code", "phrase"),
    [
        ("s3://tests/no-model/", {}, 78, "model 's3://tests/no-model/' has no config.json"),
        ("s3://tests/nowhere/", {}, 69, "there is no object below s3://tests/nowhere/"),
        ("s3://tests/no-model/", {"secret_access_key": "wrong-key-0000000000"}, 69, "SignatureDoesNotMatch"),
        ("s3:///no-model/", {}, 64, "names no bucket"),
    ],
)
def test_a_run_whose_model_can_not_be_fetched_says_why_by_its_exit_code(
    tmp_path: Path, s3_server: SeaweedServer, model: str, keys: dict[str, str], code: int, phrase: str
) -> None:
    s3_server.put_raw("tests", "no-model/model.safetensors", b"w")
    write_store_file(tmp_path / "store.json", StoreFile(stores={"input": s3_server.settings(**keys)}))
    write_lines(tmp_path / "in.jsonl", [chat("a")])
    done = vllm_batch(
        *("run", "--store", "store.json", "-i", "in.jsonl", "-o", "out/", "--model", model),
        cwd=tmp_path,
        env={"VLLM_BATCH_MODEL_CACHE": str(tmp_path / "cache")},
    )
    assert (done.code, phrase in done.err) == (code, True), done.err
    assert not (tmp_path / "cache").exists()
