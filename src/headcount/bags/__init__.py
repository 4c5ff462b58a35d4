"""What a bag is: instances in one pool, addressed in groups, with one label per group."""

from headcount.bags.bags import Bags
from headcount.bags.pool import Pool
from headcount.bags.segments import Segments

__all__ = ["Bags", "Pool", "Segments"]
