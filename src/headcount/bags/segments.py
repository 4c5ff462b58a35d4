"""Per-bag arithmetic over instances stored flat, one after the other, with the number of their bag.

N instances are in B bags; ``index`` (N,) holds 0 .. B-1, and B itself is the *trash bag*: every buffer has B + 1 rows, of which the
last is dropped. To remove an instance is therefore to re-address it: shapes stay the same, no head needs a mask, and batch-norm
still sees every image. A weight is a multiplicity: an instance of weight 2 counts as if it were in the bag twice.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from headcount.errors import HeadcountError

MIN_PRODUCT = 1 << 14  # numbers in a bag, on average, from which a matrix product for each bag is faster than one sum for all


@dataclass(eq=False, repr=False)
class Segments:
    """The bag of each instance.

    Parameters
    ----------
    index
        (N,) the bag of each instance; ``n_bags`` for a removed one.
    n_bags
        The number of bags B.
    size
        Declares that instance j is in row ``j // size`` (or was removed from it): all bags have one size, and sums become a
        reshape, which on a GPU is faster than scattering and deterministic.
    weight
        (N,) multiplicities. Set them by :meth:`with_weight`, which sends those of zero to the trash bag.
    runs
        Declares that the bags (removed instances included) stand one after the other, with these lengths.
    complete
        Declares that no instance is removed, which saves looking for them.

    Examples
    --------
    >>> s = Segments.from_sizes([2, 3])
    >>> s.sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    tensor([ 3., 12.])
    >>> s.without(torch.tensor([False, True, False, False, True])).sum(torch.ones(5))
    tensor([1., 2.])
    """

    index: Tensor
    n_bags: int
    size: int | None = None
    weight: Tensor | None = None
    runs: list[int] | None = field(default=None, kw_only=True)
    complete: bool = field(default=False, kw_only=True)

    @classmethod
    def from_sizes(cls, sizes: Sequence[int] | Tensor, device: torch.device | str | None = None) -> Self:
        """Consecutive bags of these sizes."""
        sizes = torch.as_tensor(sizes, device=device)
        if sizes.ndim != 1 or (len(sizes) and sizes.is_floating_point()) or bool((sizes < 0).any()):
            raise HeadcountError(f"bag sizes must be a list of counts, got {sizes.tolist()}")
        sizes = sizes.long()
        index = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        even = len(sizes) > 0 and bool((sizes == sizes[0]).all()) and int(sizes[0]) > 0
        return cls(index, len(sizes), int(sizes[0]) if even else None, runs=sizes.tolist(), complete=True)

    @classmethod
    def from_padded(cls, mask: Tensor) -> Self:
        """For a padded batch ``(B, L, ...)``: mask (B, L) is true where an instance is real.

        Use it with ``x.flatten(0, 1)``: the padding is addressed to the trash bag and does not count. It is still multiplied
        by weights, so it must be finite (zeros, not NaN), and batch-norm in training (head ``additive``, a backbone's) still
        sees it: there pass only the real instances, ``x[mask]``, with ``Segments.from_sizes(mask.sum(1))``.
        """
        if mask.ndim != 2:
            raise HeadcountError(f"a padding mask has two axes (bags, slots), got shape {tuple(mask.shape)}")
        bags, size = mask.shape
        rows = torch.arange(bags, device=mask.device)[:, None].expand(bags, size)
        return cls(torch.where(mask.bool(), rows, bags).flatten(), bags, size)

    def without(self, removed: Tensor) -> Self:
        """The same segments, with these instances (a mask over the N) removed."""
        return replace(self, index=torch.where(removed, self.n_bags, self.index), complete=False)

    def with_weight(self, weight: Tensor | None) -> Self:
        """The same segments, each instance counting ``weight`` times; weight zero removes it."""
        index = self.index if weight is None else torch.where(weight == 0, self.n_bags, self.index)
        return replace(self, index=index, weight=weight, complete=self.complete and weight is None)

    def to(self, device: torch.device | str) -> Self:
        weight = None if self.weight is None else self.weight.to(device)
        return replace(self, index=self.index.to(device), weight=weight)

    def repeat(self, times: int) -> Self:
        """``times`` copies of all bags, one set after the other, as the views of a batch are ordered."""
        if times == 1:
            return self
        copies = [torch.where(self.removed, self.n_bags * times, self.index + v * self.n_bags) for v in range(times)]
        weight = None if self.weight is None else self.weight.repeat(times)
        runs = None if self.runs is None else self.runs * times
        return replace(self, index=torch.cat(copies), n_bags=self.n_bags * times, weight=weight, runs=runs)

    def first_copy(self, times: int) -> Self:
        """The first of ``times`` copies: the inverse of :meth:`repeat`."""
        if times == 1:
            return self
        n, bags = len(self.index) // times, self.n_bags // times
        weight = None if self.weight is None else self.weight[:n]
        index = self.index[:n].clamp_max(bags)  # the trash bag comes after all copies
        return replace(self, index=index, n_bags=bags, weight=weight, runs=None, complete=False)

    def sum(self, x: Tensor) -> Tensor:
        """(N, ...) -> (B, ...), in float32 or wider: 64 votes of 0.1 added in bfloat16 give 6.16."""
        x = _to_float32(x)
        x = x if self.weight is None else x * _as_column(self.weight.to(x.dtype), x)
        if self.size is not None:
            return self._rows(self._fill_removed(x, 0)).sum(1)
        out = x.new_zeros((self.n_bags + 1, *x.shape[1:]))
        return out.index_add(0, self.index, x)[: self.n_bags]

    def dot(self, share: Tensor, x: Tensor) -> Tensor:
        """(N,), (N, D) -> (B, D): the sum of share * x. For bags of one size, and on the CPU for large ones, a matrix product,
        without (N, D) more numbers."""
        bag_by_bag = self.runs is not None and x.device.type == "cpu" and x.numel() >= MIN_PRODUCT * self.n_bags
        if self.size is None and not bag_by_bag:
            return self.sum(_to_float32(share)[:, None] * x)
        share = self._fill_removed(_to_float32(share), 0)
        share = share if self.weight is None else share * self.weight.to(share.dtype)
        with without_autocast(x.device.type):  # in float32, as all sums
            x = _to_float32(x).to(share.dtype)
            if self.size is not None:
                return torch.bmm(self._rows(share)[:, None], self._rows(x)).squeeze(1)
            return torch.stack([s @ rows for s, rows in zip(share.split(self.runs), x.split(self.runs), strict=True)])

    def total_weight(self) -> Tensor:
        """(B,) the total weight of each bag, without removed instances; without weights the number of instances."""
        return self.sum(torch.ones(self.index.shape, device=self.index.device))

    def n_instances(self) -> Tensor:
        """(B,) the number of instances of each bag, without removed ones, of any weight."""
        return Segments(self.index, self.n_bags, self.size).total_weight()

    def instance_weights(self) -> Tensor:
        """(N,) the multiplicity of each instance; 0 for removed ones."""
        present = (~self.removed).float()
        return present if self.weight is None else present * self.weight

    def mean(self, x: Tensor) -> Tensor:
        """(N, ...) -> (B, ...); an emptied bag gives zeros."""
        sums, total = self.sum(x), self.total_weight()
        return sums / _as_column(torch.where(total > 0, total, 1.0).to(sums.dtype), sums)

    def max(self, x: Tensor) -> Tensor:
        """(N, ...) -> (B, ...); an emptied bag gives -inf. Equal maxima share the gradient."""
        x = self._fill_removed(_to_float32(x), -torch.inf)
        if self.size is not None:
            return self._rows(x).amax(1)
        out = x.new_full((self.n_bags + 1, *x.shape[1:]), -torch.inf)
        return out.scatter_reduce(0, _as_column(self.index, x).expand_as(x), x, "amax")[: self.n_bags]

    def logsumexp(self, x: Tensor) -> Tensor:
        """(N, ...) -> (B, ...); an emptied bag gives -inf."""
        e, top = self._shifted_exp(x)
        return self.sum(e).log() + top

    def softmax(self, x: Tensor) -> Tensor:
        """(N, ...) -> (N, ...): shares that :meth:`sum` adds up to one in each bag; removed instances get zero. An instance of
        weight 2 is two copies, each of which gets this share."""
        if self.size is not None and self.complete and self.weight is None:  # one operation instead of ten
            return self._rows(_to_float32(x)).softmax(1).flatten(0, 1)
        e, _ = self._shifted_exp(x)
        total = self.sum(e)
        return e / self._fill_removed(self.broadcast(torch.where(total > 0, total, 1.0)), 1)

    def broadcast(self, v: Tensor) -> Tensor:
        """(B, ...) -> (N, ...): each instance gets its bag's row; removed ones get zeros."""
        if self.size is not None:
            return self._fill_removed(v.unsqueeze(1).expand(self.n_bags, self.size, *v.shape[1:]).flatten(0, 1), 0)
        return torch.cat([v, v.new_zeros((1, *v.shape[1:]))]).index_select(0, self.index)

    def to_dense(self, x: Tensor, fill: float = 0.0) -> tuple[Tensor, Tensor]:
        """(N, ...) -> (B, L, ...) and a mask (B, L) of the slots taken, with L the largest (or the common) bag size."""
        if self.size is not None:
            return self._rows(x.masked_fill(_as_column(self.removed, x), fill)), self._rows(~self.removed)
        slot, length = self._dense_positions()
        out = x.new_full((self.n_bags * length + 1, *x.shape[1:]), fill).index_copy(0, slot, x)
        taken = torch.zeros(self.n_bags * length + 1, dtype=torch.bool, device=x.device).index_fill(0, slot, True)
        return out[:-1].unflatten(0, (self.n_bags, length)), taken[:-1].view(self.n_bags, length)

    def to_flat(self, dense: Tensor) -> Tensor:
        """(B, L, ...) -> (N, ...), the inverse of :meth:`to_dense`; removed instances get zeros."""
        rows = dense.flatten(0, 1)
        if self.size is not None:
            return rows.masked_fill(_as_column(self.removed, rows), 0)
        return torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))]).index_select(0, self._dense_positions()[0])

    @property
    def removed(self) -> Tensor:
        """(N,) true for the instances in the trash bag."""
        return self.index == self.n_bags

    def __repr__(self) -> str:
        shape = f", size={self.size}" if self.size is not None else ""
        return f"Segments({len(self.index)} instances in {self.n_bags} bags{shape})"

    def _fill_removed(self, x: Tensor, value: float) -> Tensor:
        return x if self.complete else x.masked_fill(_as_column(self.removed, x), value)

    def _rows(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.n_bags, self.size or 0))

    def _shifted_exp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(N, ...) exp(x - top), and (B, ...) top, the largest of each bag."""
        top = self.max(x.detach())
        top = torch.where(torch.isfinite(top), top, 0.0)
        # mask removed instances before exp: masked afterwards, a large one would leave 0 * inf in the gradient
        return torch.exp(self._fill_removed(_to_float32(x), -torch.inf) - self.broadcast(top)), top

    def _dense_positions(self) -> tuple[Tensor, int]:
        """(N,) the slot of each instance in a dense (B, L), flattened, with removed ones after its end; and L."""
        counts = torch.bincount(self.index, minlength=self.n_bags + 1)
        length = int(counts[: self.n_bags].max()) if self.n_bags else 0
        starts, order = counts.cumsum(0) - counts, self.index.argsort(stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - starts[self.index[order]]
        return torch.where(self.removed, self.n_bags * length, self.index * length + rank), length


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Inside, no precision is lowered. Where none is, nothing is entered: that takes 0.1 ms."""
    lowered = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if lowered else nullcontext()


def _to_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) or not x.is_floating_point() else x


def _as_column(v: Tensor, like: Tensor) -> Tensor:
    """(N,) -> (N, 1, 1, ...), as many axes as ``like``."""
    return v.reshape(v.shape + (1,) * (like.ndim - 1))
