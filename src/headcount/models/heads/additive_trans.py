"""AdditiveTransMIL: the instances of a bag attend to each other, then each says its part of the bag's logits.

Javed et al., Additive MIL, NeurIPS 2022, on TransMIL (Shao et al., NeurIPS 2021) with Nystrom attention (Xiong et al., AAAI
2021). As released there is no class token and no position module, but a 33-tap convolution along the instances: their order
matters. Each bag is filled up in front with zero rows to a multiple of the 256 landmarks, and nothing hides them.

    H, W  heads, width of one        m  landmarks        L  places in the sheet, bags set to the right
    A     softmax(q k') over all rows, zero rows included

``attn="nystrom"`` approximates A v by A pinv(A) A v, with six steps of an iteration that begins at A' over maxima *of the
whole batch*: what is said of a bag depends, a little, on the others. ``attn="exact"`` is A v, which the detour approximates.

Zero rows are all alike, so they are kept as one row that stands many times. If u copies of a row are written as one row
times sqrt(u), every product of the iteration comes out the same: a bag of 64 costs 65 rows, not 256. A weight is a
multiplicity too and needs nothing more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.bags import Segments
from headcount.errors import HeadcountError, choose
from headcount.models.heads.base import Head, Output
from headcount.models.heads.feature import present

TAPS = 33


class AdditiveTrans(Head):
    """ReLU layer, two layers of attention, and a small MLP whose outputs, added up, are the bag's logits."""

    title = "AdditiveTransMIL"
    cites = (
        "Javed et al., Additive MIL: intrinsically interpretable multiple instance learning for pathology, NeurIPS 2022"
    )
    whole_bag = True
    order_matters = True

    def __init__(
        self,
        dim: int,
        classes: int,
        counted: Tensor | None = None,
        *,
        attn: str = "nystrom",
        dropout: float = 0.1,
        landmarks: int = 256,
        iterations: int = 6,
        width: int = 512,
        heads: int = 8,
    ) -> None:
        super().__init__(dim, classes, counted)
        self.batch_matters = choose("attn", attn, ("nystrom", "exact")) == "nystrom"
        if width % heads:
            raise HeadcountError(f"width {width} cannot be shared out over {heads} heads; give a multiple")
        self.enter = nn.Sequential(nn.Linear(dim, width), nn.ReLU())
        kind = Nystrom if attn == "nystrom" else Exact
        self.layers = nn.ModuleList(kind(width, heads, dropout, landmarks, iterations) for _ in range(2))
        self.voice = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, classes)
        )

    def forward(self, h: Tensor, segments: Segments) -> Output:
        here = present(segments)
        row, taken = here.dense(torch.arange(len(h), device=h.device))
        right = taken.byte().argsort(dim=1, stable=True)  # gaps first, then the instances in their order
        row, taken = row.gather(1, right), taken.gather(1, right)
        times = taken.float() if here.weight is None else taken * here.weight[row]  # (B, L)
        home = torch.where(taken, row, len(h)).flatten()
        t = self.enter(h)
        for layer in self.layers:
            told = layer(t, row, times).flatten(0, 1)  # (B * L, width)
            t = t + told.new_zeros(len(h) + 1, told.shape[1]).index_copy(0, home, told)[:-1]
        instance = self.voice(t).float()
        return Output(instance, self.elect(here.sum(instance)), {})


class Exact(nn.Module):
    """Attention over a bag's rows and its zero rows, plus the convolution along the rows."""

    def __init__(self, width: int, heads: int, dropout: float, landmarks: int, iterations: int) -> None:
        super().__init__()
        self.heads, self.landmarks, self.iterations = heads, landmarks, iterations
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.along = nn.Conv2d(heads, heads, (TAPS, 1), padding=(TAPS // 2, 0), groups=heads, bias=False)
        self.out = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout))

    def forward(self, t: Tensor, row: Tensor, times: Tensor) -> Tensor:
        """(N, width), the sheet's instances (B, L) and how often each stands there -> (B, L, width)."""
        x = self.qkv(self.norm(t)).index_select(0, row.flatten()).unflatten(0, row.shape)
        x = x.unflatten(2, (3, self.heads, -1))  # (B, L, 3, H, W)
        q, k, v = (x * (times > 0)[..., None, None, None]).permute(2, 0, 3, 1, 4)  # (B, H, L, W) each
        mixed = self.attend(q, k, v, times) + self.along(v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, times: Tensor) -> Tensor:
        q, k, v = (F.pad(a, (0, 0, 0, 1)) for a in (q, k, v))  # the zero row, last
        bias = self.with_zeros(times).log().to(q.dtype)[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, bias.expand(-1, -1, q.shape[2], -1))[:, :, :-1]

    def with_zeros(self, times: Tensor) -> Tensor:
        """(B, L+1): how often each row stands in the bag, the zero row last."""
        total, m = times.sum(1, keepdim=True), self.landmarks
        return torch.cat([times, (total / m).ceil().clamp_min(1) * m - total], 1)


class Nystrom(Exact):
    """As released. Always in float32: an inverse is no place for half precision."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, times: Tensor) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            kept, few = q.dtype, q.shape[2] <= self.landmarks
            q, k, v = q.float() * q.shape[3] ** -0.5, k.float(), v.float()
            return (self.few(q, k, v, times) if few else self.many(q, k, v, times)).to(kept)

    def few(self, q: Tensor, k: Tensor, v: Tensor, times: Tensor) -> Tensor:
        """Every row is its own landmark. A row that stands u times is one row with u in its products, root u on each side."""
        q, k, v = (F.pad(a, (0, 0, 0, 1)) for a in (q, k, v))  # the zero row, last
        u = self.with_zeros(times)[:, None]  # (B, 1, L+1)
        score = q @ k.mT
        a = (score - (score + u[:, :, None].log()).logsumexp(3, keepdim=True)).exp()  # one copy's attention to one copy
        left = a * u.sqrt()[:, :, None]
        whole = left * u.sqrt()[..., None]  # A, in the basis of what is alike
        columns = (a * u[..., None]).sum(2).masked_fill(u == 0, 0)  # sums of A's columns; its rows add to one
        z = self.inverse(whole, whole.mT / columns.max())
        return (left @ (z @ (whole @ (v * u.sqrt()[..., None]))))[:, :, :-1]

    def many(self, q: Tensor, k: Tensor, v: Tensor, times: Tensor) -> Tensor:
        """A bag larger than the landmarks: each landmark is the mean of l rows on end. A weight only counts in the vote."""
        m, length = self.landmarks, q.shape[2]
        sheet = -(-length // m) * m
        q, k, v = (F.pad(a, (0, 0, sheet - length, 0)) for a in (q, k, v))  # zero rows in front
        own = ((times > 0).sum(1, keepdim=True) / m).ceil().clamp_min(1)  # (B, 1) l of each bag
        place = torch.arange(sheet, device=q.device) - (
            sheet - own * m
        )  # in the bag as filled up; below zero: not there
        group = (place / own).floor()[:, None]  # (B, 1, sheet)
        member = (group == torch.arange(m, device=q.device)[:, None]) / own[..., None]  # (B, m, sheet)
        q_mark, k_mark = member[:, None] @ q, member[:, None] @ k
        whole = (q_mark @ k_mark.mT).softmax(3)
        z = self.inverse(whole, whole.mT / whole.sum(2).max())
        reach = (q_mark @ k.mT).masked_fill((place < 0)[:, None, None], -torch.inf).softmax(3)
        return ((q @ k_mark.mT).softmax(3) @ z @ (reach @ v))[:, :, sheet - length :]

    def inverse(self, a: Tensor, z: Tensor) -> Tensor:
        """A's pseudo-inverse, nearly: z <- z (13 - az (15 - az (7 - az))) / 4."""
        one = torch.eye(a.shape[3], device=a.device)
        for _ in range(self.iterations):
            az = a @ z
            z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
        return z
