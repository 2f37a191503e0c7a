"""Reading and writing past the page cache, and tensors taken out of the archives that torch.save writes."""

from __future__ import annotations

import errno
import io
import os

import pytest
import torch

from megatron_bridge import direct_io
from megatron_bridge.direct_io import ALIGNMENT, BLOCK, DirectWriter, read_tensor
from megatron_bridge.tensor_archive import load_archive


def refuse_direct(monkeypatch, name: str) -> list[int]:
    """The named call of `os` refuses O_DIRECT, as some file systems do. Returns the refused flags."""
    refused: list[int] = []
    real, flags_of = getattr(os, name), direct_io.fcntl.fcntl

    def call(target, argument, *rest):
        flags = argument if name == "open" else flags_of(target, direct_io.fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            refused.append(flags)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(target, argument, *rest)

    monkeypatch.setattr(os, name, call)
    return refused


@pytest.mark.parametrize("refused_by", [None, "open", "pwritev", "preadv"])
@pytest.mark.parametrize("size", [0, 1, ALIGNMENT, BLOCK - 1, 2 * BLOCK, 2 * BLOCK + ALIGNMENT + 3])
def test_what_is_written_is_read_back(size, refused_by, tmp_path, monkeypatch):
    content = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    refused = refuse_direct(monkeypatch, refused_by) if refused_by else []
    with DirectWriter(tmp_path / "file") as file:
        for part in content.split(BLOCK // 3 + 1):
            file.write(part.numpy())
        assert file.tell() == size
    assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()
    assert torch.equal(read_tensor(tmp_path / "file", 0, torch.uint8, (size,)), content)
    assert refused or refused_by is None or size == 0


@pytest.mark.parametrize("start", [0, 1, 3, 8, ALIGNMENT - 1, ALIGNMENT + 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_may_lie_at_any_byte(start, dtype, tmp_path):
    value = torch.arange(60_000).to(dtype).reshape(20, -1)
    (tmp_path / "file").write_bytes(b"x" * start + value.view(torch.uint8).numpy().tobytes() + b"y" * 5)
    found = read_tensor(tmp_path / "file", start, dtype, tuple(value.shape))
    assert torch.equal(found, value) and found.dtype == dtype
    assert found.untyped_storage().nbytes() == value.nbytes and found.data_ptr() % dtype.itemsize == 0


def test_a_file_that_ends_too_early_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10_000))
    with pytest.raises(EOFError, match="has 10000 bytes, 10002 were expected"):
        read_tensor(tmp_path / "file", 2, torch.float32, (2500,))


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"), DirectWriter(tmp_path / "file") as file:
        for _ in range(3):
            file.write(bytes(BLOCK))


def archive_of(value: object, tmp_path, start: int) -> torch.Tensor:
    stream = io.BytesIO()
    torch.save(value, stream)
    (tmp_path / "file").write_bytes(bytes(start) + stream.getvalue() + b"PK\5\6 of the next one")
    return read_tensor(tmp_path / "file", start, torch.uint8, (len(stream.getvalue()),))


@pytest.mark.parametrize("start", [0, 1, 4097])
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(300.0).reshape(3, 100).bfloat16(),
        torch.arange(24.0, dtype=torch.float64).reshape(4, 6).t(),
        torch.arange(100)[10:40:3],
        torch.tensor(1.5),
    ],
    ids=["plain", "transposed", "strided", "scalar"],
)
def test_an_archive_gives_the_tensor_that_was_saved(value, start, tmp_path):
    archive = archive_of(value, tmp_path, start)
    memory = range(archive.data_ptr(), archive.data_ptr() + len(archive))
    found = load_archive(archive)
    assert torch.equal(found, value) and found.dtype == value.dtype and found.stride() == value.stride()
    assert found.data_ptr() in memory


class Exploit:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("value", [Exploit(), torch.nn.Parameter(torch.ones(2))], ids=["code", "parameter"])
def test_an_archive_of_anything_else_is_refused(value, tmp_path):
    with pytest.raises(ValueError, match="holds no tensor"):
        load_archive(archive_of(value, tmp_path, 0))


def test_a_damaged_archive_is_refused(tmp_path):
    archive = archive_of(torch.ones(300), tmp_path, 0)
    archive[-22:] = 0
    with pytest.raises(ValueError, match="damaged"):
        load_archive(archive)
