"""MCTformer+: one token per class attends to the instances of a bag, and its attention classifies them.

Xu et al.'s instances are the patches of an image; a bag has no grid, so they get no positions and the 3x3 convolution over patches
is a linear layer. The authors of the majority-label paper released no code for it: the adaptation is ours. (K tokens: C class
tokens, then the L instances of a bag, in width W; u (B, L) multiplicities.)
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.bags import Segments
from headcount.errors import HeadcountError, check_choice
from headcount.models.heads.base import Batch, Head, Output, nll


class TransformerBlock(nn.Module):
    """A pre-norm transformer block. Returns the tokens, and the queries and keys for the maps."""

    def __init__(self, width: int, heads: int, drop_path: float) -> None:
        super().__init__()
        self.heads, self.drop_path = heads, drop_path
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, K, W/H)
        x = x + self.stochastic_depth(self.out(attend(q, k, v, bias).transpose(1, 2).flatten(2)))
        return x + self.stochastic_depth(self.mlp(self.norm2(x))), q.detach(), k.detach()

    def stochastic_depth(self, x: Tensor) -> Tensor:
        """Now and then a bag takes the short way round."""
        return x * F.dropout(x.new_ones(len(x), 1, 1), self.drop_path, self.training)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    mask = None if bias is None else bias[:, None, None].to(q.dtype).expand(-1, -1, q.shape[2], -1)
    return F.scaled_dot_product_attention(q, k, v, mask)


class MCTformer(Head):
    """A bag's logits: the mean of the class tokens' means and of the instances' logits, pooled by rank.

    ::

        loss      "multilabel": each class yes or no, as in the original; "softmax": one class wins. Both add the contrast of
                  the class tokens. ``validation="bag"`` selects by the likelihood of the bag output instead.
        instance  "fused": class-to-instance attention times the instance's logits, spread by instance-to-instance attention;
                  "patch": the logits; "attention": the attention alone.
        decay     of the pooling by rank. 0.996 is the original's, for 784 patches; 0.951 does the same to 64 instances.
    """

    title = "MCTformer+"
    cites = "Xu et al., MCTformer+: Multi-class token transformer for weakly supervised semantic segmentation, TPAMI 2024"
    depends_on_bag = True
    compiled = True

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *,
        layers: int = 12, width: int = 384, heads: int = 6, drop_path: float = 0.1, decay: float = 0.996,
        loss: str = "multilabel", instance: str = "fused", validation: str = "full",
    ) -> None:  # fmt: skip
        super().__init__(dim, classes, counted)
        self.kind = check_choice("loss", loss, ("multilabel", "softmax"))
        self.mode = check_choice("instance", instance, ("fused", "patch", "attention"))
        self.validation = check_choice("validation", validation, ("full", "bag"))
        if not 0 < decay <= 1:
            raise HeadcountError(f"the decay must be above 0 and at most 1, got {decay}")
        if layers < 1 or width % heads:
            raise HeadcountError(f"width must be a multiple of heads, and layers 1 or more; got {width}, {heads} and {layers}")
        self.decay = decay
        self.embed, self.patch = nn.Linear(dim, width), nn.Linear(width, classes)
        self.token = nn.Parameter(nn.init.trunc_normal_(torch.empty(classes, width), std=0.02))
        self.position = nn.Parameter(nn.init.trunc_normal_(torch.empty(classes, width), std=0.02))  # of the class tokens
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, drop_path * i / max(1, layers - 1)) for i in range(layers))

    def forward(self, h: Tensor, segments: Segments) -> Output:
        dense, _ = segments.to_dense(self.embed(h))  # (B, L, W)
        u = segments.to_dense(segments.instance_weights())[0]  # 0 in a gap
        bias = F.pad(u.log(), (self.classes, 0))  # (B, K): u copies of a key are one key with log u more
        x = torch.cat([(self.token + self.position).expand(len(dense), -1, -1).to(dense.dtype), dense], 1)
        unmasked = segments.complete and segments.size is not None  # all zeros, and without them attention is faster
        maps, tokens = [], []
        for block in self.blocks:
            x, *queries_and_keys = block(x, None if unmasked else bias)
            maps.append(queries_and_keys)
            tokens.append(x[:, : self.classes])
        token = F.normalize(torch.stack(tokens).float(), dim=3)  # (layers, B, C, W)
        contrast = (token @ token.mT).log_softmax(3).diagonal(dim1=2, dim2=3).mean(0)
        logits = self.patch(x[:, self.classes :]).float()  # (B, L, C)
        token, pooled = x[:, : self.classes].float().mean(2), rank_pool(logits, u, self.decay)
        instance = logits if self.mode == "patch" else self.instance_maps(maps, bias, logits.detach())
        parts = {"token": token, "pooled": pooled, "contrast": contrast}
        return Output(segments.to_flat(instance), self.masked_log_softmax((token + pooled) / 2), parts)

    @torch.no_grad()
    def instance_maps(self, maps: list[list[Tensor]], bias: Tensor, logits: Tensor) -> Tensor:
        """(B, L, C) logits, from the queries and keys of each block. The original's map is P sqrt(M F): M the attention of the
        class tokens, F the positive part of the logits, P the attention between instances. Scaling the map of a bag changes no
        prediction, so M is multiplied by the bag's size and P is a mean over blocks: the map is then of the order of sqrt(F) for
        every bag, and its softmax neither flat nor certain. Where the map is zero for all classes the logits stand. The logarithm
        of M alone makes the softmax a class's share of the attention. No gradient: no loss uses a map."""
        c, attention, refined = self.classes, torch.zeros_like(logits), torch.zeros_like(logits)
        for q, k in maps[-12:]:
            score = q[:, :, :c].float() @ k.float().mT * q.shape[3] ** -0.5
            share = (score - (score + bias[:, None, None]).logsumexp(3, keepdim=True)).exp()[..., c:]  # of one copy
            attention += share.mean(1).mT / min(12, len(maps))
        if self.mode == "attention":
            return attention.clamp_min(torch.finfo(torch.float32).tiny).log()
        size = bias[:, c:].exp().sum(1)[:, None, None]
        class_map = (size * attention * logits.relu()).sqrt()
        _, heads, _, width = maps[0][0].shape
        value = F.pad(class_map, (0, max(0, width - c), c, 0))  # 0 for class tokens; as wide as the keys, for the fast kernels
        for q, k in maps:
            v = value[:, None].expand(-1, heads, -1, -1).to(q.dtype)
            refined += attend(q[:, :, c:], k, v, bias).float().mean(1)[..., :c] / len(maps)
        return torch.where((refined > 0).any(2, keepdim=True), refined, logits)

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        target = batch.target
        if not self.training and self.validation == "bag":
            return nll(output.bag, target)
        loss, labelled = nll(output.parts["contrast"], target), target.sum(1) > 0
        for logits in (output.parts["token"], output.parts["pooled"]):
            if self.kind == "softmax":
                loss = loss + nll(self.masked_log_softmax(logits), target)
                continue
            losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
            losses = losses.mean(1) if self.counted is None else (losses * self.counted).sum(1) / self.counted.sum()
            loss = loss + torch.where(labelled, losses, 0.0).sum() / labelled.sum().clamp_min(1)
        return loss


def rank_pool(logits: Tensor, u: Tensor, decay: float) -> Tensor:
    """(B, L, C), (B, L) -> (B, C): the mean of the values, the k-th largest weighing decay^k. u copies take u ranks.

    >>> rank_pool(torch.tensor([[[3.0], [1.0], [2.0]]]), torch.ones(1, 3), 0.996)
    tensor([[2.0027]])
    """
    order = logits.masked_fill((u == 0)[..., None], -torch.inf).argsort(1, descending=True)
    logits, u = logits.gather(1, order), u[..., None].expand_as(logits).gather(1, order)
    before, slope = u.cumsum(1) - u, math.log(decay)
    weight = -(before * slope).exp() * torch.expm1(u * slope) if decay < 1 else u  # d^before + ... + d^(before+u-1)
    return (weight * logits).sum(1) / weight.sum(1).clamp_min(1e-12)
