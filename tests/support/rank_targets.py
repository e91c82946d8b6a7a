"""What ranks of a test's ``RankGroup`` do: a collective for each plan, and what the job says."""

import json
import time
from zlib import crc32

import torch

from minisgl.distributed.progress import Digests
from minisgl.distributed.rank_process import RankLink
from minisgl.errors import DoesNotFitError


def act(link: RankLink) -> None:
    """Run plans whose first byte is their number; misbehave as the job says."""
    job = json.loads(bytes(link.receive_job()))
    if job.get("fail_at_start"):
        raise DoesNotFitError("no room for anything")
    if job.get("never_connect"):
        time.sleep(600)
    communicator = link.connect()
    for frame in link.plans():
        number = frame[0]
        link.progress.begin(number)
        if number == job.get("crash_in"):
            raise ZeroDivisionError("one rank divides by zero\nand says more")
        communicator.all_reduce(torch.ones(1))
        link.progress.finish(number, Digests(crc32(frame), 0))
