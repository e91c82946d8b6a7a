"""Frames between two processes: whole, in order, and nobody waits for ever."""

import threading

import pytest

from minisgl.distributed.channel import Channel


def pair(timeout: float = 30) -> tuple[Channel, Channel]:
    here, there = Channel.pair(timeout)
    return here, Channel(there, timeout)


def test_frames_arrive_whole_and_in_order() -> None:
    here, there = pair()
    sizes = [0, 1, 7, 8, 9, 4096, 3_000_000, 2]
    frames = [bytes([n]) * size for n, size in enumerate(sizes)]

    def send_all() -> None:
        for frame in frames:
            here.send(memoryview(frame))

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [bytes(there.receive(30) or b"") for _ in frames] == frames
    sender.join()
    assert there.receive(0) is None
    here.close()
    there.close()


def test_what_was_sent_before_the_end_is_received_after_it() -> None:
    here, there = pair()
    here.send(b"last words")
    here.close()
    assert there.receive(0) == bytearray(b"last words")
    with pytest.raises(ConnectionError):
        there.receive(None)
    with pytest.raises(ConnectionError):
        there.send(b"anybody?")
    there.close()


def test_a_peer_that_reads_nothing_is_given_up() -> None:
    here, there = pair(timeout=0.1)
    with pytest.raises(TimeoutError):
        here.send(bytes(30_000_000))
    here.close()
    there.close()
