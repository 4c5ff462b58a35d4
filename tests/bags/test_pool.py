"""Prefetching reads ahead, in bounded memory, and reports errors to the reader."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from headcount.bags import Pool
from headcount.bags.pool import Prefetcher
from headcount.errors import HeadcountError


def test_numbers_may_be_stored_in_either_byte_order():
    x = np.arange(6.0).reshape(3, 2)
    for order in "<>":
        assert Pool(x.astype(f"{order}f4")).data.tolist() == x.tolist()


class SlowPool(Pool):
    """A pool whose reads take time, as from a disk."""

    seconds = 0.02

    def take(self, addresses):
        time.sleep(self.seconds)
        return self.data.index_select(0, addresses)


def test_reads_that_keep_up_do_not_stall():
    """Each read takes 20 ms and each step 30: in parallel 0.6 s, one after the other 1."""
    pool, plan = SlowPool(np.zeros((40, 3), dtype=np.float32)), list(torch.arange(40).split(2))
    reader, started = Prefetcher(pool, torch.device("cpu"), plan), time.perf_counter()
    for addresses in plan:
        assert len(reader.take(addresses)) == 2
        time.sleep(0.03)
    seconds = time.perf_counter() - started
    reader.close()
    assert reader.stall_seconds < 0.1, "the first read, and little else"
    assert seconds < 0.9


def test_no_more_than_the_depth_is_read_ahead():
    read = []

    class CountingPool(SlowPool):
        seconds = 0.0

        def take(self, addresses):
            read.append(len(addresses))
            return super().take(addresses)

    plan = list(torch.arange(40).split(2))
    reader = Prefetcher(CountingPool(np.zeros((40, 3), dtype=np.float32)), torch.device("cpu"), plan, depth=2)
    reader.take(plan[0])
    time.sleep(0.2)
    assert len(read) == 3, "one taken, two ready"
    reader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("headcount-prefetch")]


def test_a_failed_read_is_raised_where_it_is_taken():
    class BrokenPool(SlowPool):
        def take(self, addresses):
            raise HeadcountError("row 3 is gone")

    plan = [torch.arange(2)]
    broken = Prefetcher(BrokenPool(np.zeros((4, 3), dtype=np.float32)), torch.device("cpu"), plan)
    with pytest.raises(HeadcountError, match="row 3 is gone"):
        broken.take(plan[0])
    broken.close()


def test_reads_must_follow_the_plan():
    reader = Prefetcher(SlowPool(np.zeros((4, 3), dtype=np.float32)), torch.device("cpu"), [torch.arange(2)])
    with pytest.raises(RuntimeError, match="differ from the planned"):
        reader.take(torch.tensor([2, 3]))
    with pytest.raises(RuntimeError, match="more reads than were planned"):
        reader.take(torch.arange(2))
    reader.close()
