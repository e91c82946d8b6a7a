"""What a benchmark leaves in a file: all of its record, or what was there before."""

import errno
import json
import os
from pathlib import Path
from threading import Thread

import pytest

from minisgl.cli.bench.output import check_writable, write_cells, write_json
from minisgl.errors import MinisglError

RECORD = {"benchmark": "attention", "models": {"a": "16/8x128"}}


def test_cells_have_a_line_each(tmp_path):
    file = tmp_path / "cells.json"
    write_cells(file, RECORD, [{"us": 1.5}, {"us": 2}])
    assert json.loads(file.read_text()) == {**RECORD, "cells": [{"us": 1.5}, {"us": 2}]}
    assert '    {"us": 1.5},\n    {"us": 2}\n' in file.read_text()
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "write",
    [lambda file: write_cells(file, RECORD, [{"us": 1}]), lambda file: write_json(file, {})],
)
def test_a_write_that_fails_leaves_the_last_file_whole(tmp_path, monkeypatch, write):
    """The disk is full after some bytes, with the cells of an hour in the file."""
    file = tmp_path / "kept.json"
    write_json(file, RECORD)
    before = file.read_bytes()

    def full(path, text, **how):
        with path.open("w") as out:
            out.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(MinisglError, match=r"kept\.json' cannot be written: No space left"):
        write(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_whoever_reads_meanwhile_sees_a_whole_file(tmp_path):
    file = tmp_path / "kept.json"
    write_json(file, RECORD)
    with file.open() as reader:
        write_cells(file, RECORD, [{"us": 1}] * 1000)
        assert json.loads(reader.read()) == RECORD
    assert len(json.loads(file.read_text())["cells"]) == 1000


def test_a_link_stays_one(tmp_path):
    (tmp_path / "far").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to("far/real.json")
    for record in (RECORD, {}):  # the file is made, then replaced
        check_writable("--json", link)
        write_json(link, record)
        assert link.is_symlink()
        assert json.loads((tmp_path / "far" / "real.json").read_text()) == record


def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable("--json", pipe)
    read = []
    reader = Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_json(pipe, RECORD)
    reader.join(60)
    assert json.loads(read[0]) == RECORD
    assert pipe.is_fifo()
