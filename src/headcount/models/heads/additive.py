"""AdditiveMIL, AdditiveTransMIL and MILLET: a bag's logits are the sum, or the mean, of its instances' (weighted) logits, so that the
contribution of each is known.

Javed et al., Additive MIL, NeurIPS 2022. AdditiveTransMIL is on TransMIL (Shao et al., NeurIPS 2021) with Nystrom attention
(Xiong et al., AAAI 2021). As released there is no class token and no position module, but a 33-tap convolution along the
instances: their order matters. Each bag is padded in front with zero rows to a multiple of the 256 landmarks, and they are not masked.

With A = softmax(q k') over all rows, zero rows included, ``attn="nystrom"`` approximates A v by A pinv(A) A v, with six steps of an
iteration that begins at A' divided by maxima *over the whole batch*: a bag's prediction depends, slightly, on the other bags.
``attn="exact"`` is A v itself.  (H heads of width W, m landmarks, L rows of the dense layout, bags aligned to the right.)

All zero rows are equal, so they are kept as one row with a multiplicity. If u copies of a row are written as one row times
sqrt(u), every product of the iteration is the same: a bag of 64 costs 65 rows, not 256. The weight of an instance is a
multiplicity too; in the convolution alone it counts once.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headcount.bags import Segments
from headcount.bags.segments import without_autocast
from headcount.errors import HeadcountError, check_choice
from headcount.models.heads.base import Head, Output, SumHead

TAPS = 33
JAVED = "Javed et al., Additive MIL: intrinsically interpretable multiple instance learning for pathology, NeurIPS 2022"


class Additive(Head):
    """Attention-scaled features through an MLP, summed over the bag.

    a = softmax of score(h_i) over the bag, z_i = MLP(a_i h_i), bag = softmax(sum of z_i). Batch-norm inside the attention includes
    removed instances.
    """

    title, cites = "AdditiveMIL", JAVED
    depends_on_bag = True

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None, *, width: int = 256) -> None:
        super().__init__(dim, classes, counted)
        self.score = nn.Sequential(
            *(nn.Linear(dim, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2)),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2)),
            nn.Linear(width, 1),
        )
        self.classifier = nn.Sequential(
            nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )

    def forward(self, h: Tensor, segments: Segments) -> Output:
        attention = segments.softmax(self.score(h).float())  # (N, 1)
        instance = self.classifier((attention * h).to(h.dtype)).float()
        return Output(instance, self.masked_log_softmax(segments.sum(instance)), {"attention": attention})


class Millet(SumHead):
    """Conjunctive pooling: a = sigmoid(w tanh(V h)), z = W h; a bag's logits are the mean of a z.

    The mean is over the instances, not over the attention. ``confidence`` is the form of the paper on majority labels: the mean of
    softmax(z), weighted by a, is the bag's probability. ``positions`` adds the sinusoids of the original, meant for time series;
    bags have no order, so it is off.
    """

    title = "MILLET"
    cites = "Early et al., Inherently interpretable time series classification via multiple instance learning, ICLR 2024"

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *,
        dropout: float = 0.1, confidence: bool = False, positions: bool = False, width: int = 8,
    ) -> None:  # fmt: skip
        super().__init__(dim, classes, counted)
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Sequential(nn.Linear(dim, width), nn.Tanh(), nn.Linear(width, 1), nn.Sigmoid())
        self.confidence, self.depends_on_order = confidence, positions

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.dropout(h)
        a, z = self.score(h).float(), self.classifier(h).float()
        return z, a * torch.cat([z.softmax(1), torch.ones_like(a)], 1) if self.confidence else a * z

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        if self.confidence:
            return self.masked_log_softmax((sums[:, :-1] / sums[:, -1:].clamp_min(1e-12)).clamp_min(1e-30).log())
        return self.masked_log_softmax(sums / total[:, None])

    def forward(self, h: Tensor, segments: Segments) -> Output:
        if self.depends_on_order:  # sine and cosine in turn of each instance's position in its bag, the removed not counted
            _, taken = segments.to_dense(segments.index)
            position = segments.to_flat((taken.cumsum(1) - 1).float())  # (N,)
            slow = torch.arange(0, self.dim, 2, device=h.device) * (-math.log(10000.0) / self.dim)
            angle = position[:, None] * slow.exp()
            h = h + torch.stack([angle.sin(), angle.cos()], 2).flatten(1)[:, : self.dim].to(h.dtype)
        return super().forward(h, segments)


class AdditiveTrans(Head):
    """Two layers of attention between instances, and a small MLP whose outputs sum to the bag's logits.

    ::

        t   = ReLU layer of h
        t   = t + attention(t), twice
        z_i = MLP(t_i)                    bag = softmax(sum of z_i over the bag)
    """

    title, cites = "AdditiveTransMIL", JAVED
    depends_on_bag = True
    depends_on_order = True
    compiled = True

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *,
        attn: str = "nystrom", dropout: float = 0.1, landmarks: int = 256, iterations: int = 6, width: int = 512, heads: int = 8,
    ) -> None:  # fmt: skip
        super().__init__(dim, classes, counted)
        self.depends_on_batch = check_choice("attn", attn, ("nystrom", "exact")) == "nystrom"
        if width % heads:
            raise HeadcountError(f"width {width} is not divisible by {heads} heads; give a multiple")
        self.embed = nn.Sequential(nn.Linear(dim, width), nn.ReLU())
        kind = NystromAttention if attn == "nystrom" else ExactAttention
        self.layers = nn.ModuleList(kind(width, heads, dropout, landmarks, iterations) for _ in range(2))
        self.classifier = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, classes)
        )

    def forward(self, h: Tensor, segments: Segments) -> Output:
        n, unweighted = len(h), segments.weight is None
        row, filled = segments.to_dense(torch.arange(n, device=h.device))
        right = filled.byte().argsort(dim=1, stable=True)  # gaps first, then the instances in their order
        row, filled = row.gather(1, right), filled.gather(1, right)
        times = filled.float() if segments.weight is None else filled * segments.weight[row]  # (B, L)
        in_order = segments.complete and segments.size is not None  # then row is 0 .. N-1, and nothing has to be moved
        instance_index = torch.where(filled, row, n).flatten()
        t = self.embed(h)
        for layer in self.layers:
            update = layer(t, None if in_order else row, times, unweighted).flatten(0, 1)  # (B * L, width)
            if not in_order:
                update = update.new_zeros(n + 1, update.shape[1]).index_copy(0, instance_index, update)[:-1]
            t = t + update
        instance = self.classifier(t).float()
        return Output(instance, self.masked_log_softmax(segments.sum(instance)), {})


class ExactAttention(nn.Module):
    """Attention over the rows of a bag and its zero rows, plus the convolution along the rows."""

    def __init__(self, width: int, heads: int, dropout: float, landmarks: int, iterations: int) -> None:
        super().__init__()
        self.heads, self.landmarks, self.iterations = heads, landmarks, iterations
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.residual_conv = nn.Conv2d(heads, heads, (TAPS, 1), padding=(TAPS // 2, 0), groups=heads, bias=False)
        self.out = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout))

    def forward(self, t: Tensor, row: Tensor | None, times: Tensor, unweighted: bool) -> Tensor:
        """(N, width), the instance of each row (B, L; None: in order, no gaps) and its multiplicity (``unweighted``: 0 or 1)
        -> (B, L, width)."""
        x = self.qkv(self.norm(t))
        if row is not None:
            x = x.index_select(0, row.flatten()) * (times > 0).flatten()[:, None]
        x = x.view(*times.shape, 3, self.heads, -1)  # (B, L, 3, H, W)
        q, k, v = x.permute(2, 0, 3, 1, 4)  # (B, H, L, W) each
        mixed = self.attend(q, k, v, times, unweighted) + self.residual_conv(v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, times: Tensor, unweighted: bool) -> Tensor:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        bias = self.multiplicities(times).log().to(q.dtype)[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, bias.expand(-1, -1, q.shape[2], -1))

    def multiplicities(self, times: Tensor) -> Tensor:
        """(B, L+1): the multiplicity of each row of the bag, the zero row last."""
        total, m = times.sum(1, keepdim=True), self.landmarks
        return torch.cat([times, (total / m).ceil().clamp_min(1) * m - total], 1)


class NystromAttention(ExactAttention):
    """As released. In float32 at least: the iteration does not converge in half precision."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, times: Tensor, unweighted: bool) -> Tensor:
        with without_autocast(q.device.type):
            small = unweighted and q.shape[2] <= self.landmarks
            dtype = torch.promote_types(q.dtype, torch.float32)
            inputs = [x.to(dtype) for x in (q * q.shape[3] ** -0.5, k, v, self.multiplicities(times))]
            return (self.attend_rows(*inputs) if small else self.attend_landmarks(*inputs)).to(q.dtype)

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
        """Every row is its own landmark. u copies of a row are one row, with sqrt(u) on both sides of a product."""
        length = q.shape[2]
        spare = -u.shape[1] % 8  # rows of multiplicity 0 count for nothing, and matrix products like multiples of 8
        q, k, v = (F.pad(x, (0, 0, 0, 1 + spare)) for x in (q, k, v))
        u = F.pad(u, (0, spare))[:, None, :, None]  # (B, 1, L+1+spare, 1)
        root = u.sqrt()
        inverse_root = torch.where(u > 0, root, torch.inf).reciprocal()
        reach = (q @ k.mT + u.mT.log()).softmax(3) * inverse_root.mT
        whole = root * reach  # A, in a basis of distinct rows
        z = self.pseudo_inverse(whole, inverse_root.mT * (root.mT @ whole))
        return (reach @ (z @ (whole @ (root * v))))[:, :, :length]

    def attend_landmarks(self, q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
        """Each landmark is the mean of l consecutive rows, l as small as the bag allows; zero rows come first."""
        m = self.landmarks
        group = (u.sum(1) / m)[:, None, None]  # (B, 1, 1) l
        end = (u[:, -1:] + u[:, :-1].cumsum(1))[:, None]  # (B, 1, L): u copies of a row occupy the u places before
        first = torch.arange(m, device=q.device)[:, None] * group  # (B, m, 1)
        shared = torch.minimum(end, first + group) - torch.maximum(end - u[:, None, :-1], first)
        member = (shared.clamp_min(0) / group)[:, None]  # (B, 1, m, L)
        q_mark, k_mark = member @ q, member @ k
        whole = (q_mark @ k_mark.mT).softmax(3)
        z = self.pseudo_inverse(whole, whole.sum(2))
        reach = (q_mark @ F.pad(k, (0, 0, 0, 1)).mT + u.log()[:, None, None]).softmax(3)[..., :-1]
        return (q @ k_mark.mT).softmax(3) @ (z @ (reach @ v))

    def pseudo_inverse(self, a: Tensor, columns: Tensor) -> Tensor:
        """An approximate pseudo-inverse of A: z <- z (13 - az (15 - az (7 - az))) / 4. It begins at A' divided by the largest sum
        of a column and the largest sum of a row, here 1, *of the whole batch*."""
        return IteratedInverse.apply(a.flatten(0, 1), (a.mT / columns.max()).flatten(0, 1), self.iterations).view_as(a)


class IteratedInverse(torch.autograd.Function):
    """The iteration and its gradient, each sum of a product and a matrix as one operation: a third of the kernels."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, z: Tensor, iterations: int) -> Tensor:
        """(n, m, m) matrices A and the first z -> the last z."""
        saved = []
        for _ in range(iterations):
            y = a @ z
            s = torch.baddbmm(y, y, y, beta=7, alpha=-1)  # y (7 - y)
            t = torch.baddbmm(y, y, s, beta=15, alpha=-1)  # y (15 - s)
            saved += [z, y, s, t]
            z = torch.baddbmm(z, z, t, beta=3.25, alpha=-0.25)  # z (13 - t) / 4
        ctx.save_for_backward(a, *saved)
        return z

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor, None]:
        a, *saved = ctx.saved_tensors
        da = torch.zeros_like(a)
        with without_autocast(a.device.type):  # compiled code may run this where precision is lowered
            for i in range(len(saved) - 4, -1, -4):
                z, y, s, t = saved[i : i + 4]
                dt = z.mT @ dz  # this, ds and dy times -4
                dz = torch.baddbmm(dz, dz, t.mT, beta=3.25, alpha=-0.25)
                ds = y.mT @ dt  # and times -1
                dy = torch.baddbmm(dt, dt, s.mT, beta=15, alpha=-1).sub_(ds, alpha=7)
                dy = dy.baddbmm_(ds, y.mT).baddbmm_(y.mT, ds)
                da, dz = da.baddbmm_(dy, z.mT, alpha=-0.25), dz.baddbmm_(a.mT, dy, alpha=-0.25)
        return da, dz, None
