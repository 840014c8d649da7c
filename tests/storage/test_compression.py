from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from airflow_vllm_batch.storage.compression import (
    CorruptStreamError,
    compress,
    compress_to_file,
    decompress,
    decompress_small,
    zstd_file,
)

TEXT = b'{"custom_id":"row"}\n' * 1000


async def pieces(data: bytes, size: int = 1 << 20) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def unpacked(data: bytes, name: str, size: int = 1 << 20) -> bytes:
    return b"".join([chunk async for chunk in decompress(pieces(data, size), name)])


def packed(members: Iterable[bytes], suffix: str) -> bytes:
    return b"".join(gzip.compress(each) if suffix == ".gz" else compress(each) for each in members)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@given(members=st.lists(st.binary(max_size=300), min_size=1, max_size=4), size=st.integers(1, 64))
async def test_members_come_back_whatever_the_chunks(suffix: str, members: list[bytes], size: int) -> None:
    assert await unpacked(packed(members, suffix), f"in.jsonl{suffix}", size) == b"".join(members)


async def test_another_suffix_is_left_as_it_is() -> None:
    assert await unpacked(gzip.compress(b"x"), "in.jsonl") == gzip.compress(b"x")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kept", [0, 1, 5, 20, -1, -5])
async def test_a_truncated_stream_is_an_error_that_says_where(suffix: str, kept: int) -> None:
    data = packed([TEXT, TEXT], suffix)
    cut = data[:kept]
    with pytest.raises(CorruptStreamError, match=rf"in{suffix} is truncated: the .* stream stops after \d+ bytes"):
        await unpacked(cut, f"in{suffix}")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
async def test_a_stream_cut_between_members_can_not_be_told_from_a_whole_one(suffix: str) -> None:
    assert await unpacked(packed([TEXT], suffix), f"in{suffix}") == TEXT


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
async def test_a_flipped_bit_is_found_by_the_checksum(suffix: str) -> None:
    data = bytearray(packed([bytes(range(256)) * 50], suffix))
    data[-6] ^= 1
    with pytest.raises(CorruptStreamError, match="damaged near byte"):
        await unpacked(bytes(data), f"in{suffix}")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
async def test_garbage_after_the_stream_is_an_error(suffix: str) -> None:
    with pytest.raises(CorruptStreamError):
        await unpacked(packed([TEXT], suffix) + b"garbage", f"in{suffix}")


async def test_zero_bytes_after_a_gzip_stream_are_padding() -> None:
    assert await unpacked(gzip.compress(TEXT) + bytes(512), "in.gz", 100) == TEXT


async def test_skippable_frames_are_skipped() -> None:
    skippable = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"index"
    assert await unpacked(skippable + compress(TEXT) + skippable + compress(b"x"), "in.zst") == TEXT + b"x"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
async def test_a_bomb_comes_in_chunks_of_a_mebibyte(suffix: str) -> None:
    size = 64 * 1024 * 1024
    data = zlib.compress(bytes(size), wbits=31) if suffix == ".gz" else compress(bytes(size))
    sizes = [len(chunk) async for chunk in decompress(pieces(data), f"in{suffix}")]
    assert sum(sizes) == size
    assert max(sizes) <= 1024 * 1024


async def test_a_frame_that_asks_for_a_window_of_gigabytes_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(b"x" * 1000) + compressor.flush()
    with pytest.raises(CorruptStreamError, match="damaged near byte 0"):
        await unpacked(data, "in.zst")


def test_a_small_object_comes_back_and_a_large_one_is_refused() -> None:
    assert decompress_small(compress(TEXT) + compress(b"x"), name="segment", limit_bytes=20_001) == TEXT + b"x"
    assert decompress_small(compress(b""), name="segment", limit_bytes=0) == b""
    with pytest.raises(CorruptStreamError, match="segment holds more than 19999 bytes"):
        decompress_small(compress(TEXT), name="segment", limit_bytes=19_999)
    for torn in (b"", compress(TEXT)[:-1], compress(TEXT)[:3]):
        with pytest.raises(CorruptStreamError, match="segment is truncated"):
            decompress_small(torn, name="segment", limit_bytes=20_000)
    with pytest.raises(CorruptStreamError, match="segment is damaged"):
        decompress_small(b"no zstd at all", name="segment", limit_bytes=20_000)


async def test_a_written_file_is_one_checked_stream(tmp_path: Path) -> None:
    assert await compress_to_file(pieces(TEXT, 777), tmp_path / "a.zst") == 20_000
    assert await unpacked((tmp_path / "a.zst").read_bytes(), "a.zst") == TEXT
    with zstd_file(tmp_path / "b.zst") as writer:
        writer.write(b"one")
        writer.write(b"two")
    assert await unpacked((tmp_path / "b.zst").read_bytes(), "b.zst") == b"onetwo"


async def test_a_file_whose_writing_failed_can_not_be_taken_for_whole(tmp_path: Path) -> None:
    def write() -> None:
        with zstd_file(tmp_path / "a.zst") as writer:
            writer.write(TEXT)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()
    with pytest.raises(CorruptStreamError):
        await unpacked((tmp_path / "a.zst").read_bytes(), "a.zst")
