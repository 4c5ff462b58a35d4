"""A toy that asks the loop for everything it offers: two views, a moving-average teacher, a pass over bags and a pass over
loose instances with optimizers of their own, and memory per bag and per instance."""

import torch
from torch import nn

from headcount.models.heads import Head, Output, Pass, nll


class Toy(Head):
    """Votes of two linear layers; the second learns from loose instances and from the teacher."""

    title = "Toy"
    views = 2
    teacher = 0.9
    passes = (
        Pass("bags", ("backbone", "head.voice")),
        Pass("instances", ("backbone", "head.echo")),
    )

    def __init__(self, dim, classes, counted=None, *, dropout=0.2):
        super().__init__(dim, classes, counted)
        self.classifier, self.echo, self.dropout = nn.Linear(dim, classes), nn.Linear(dim, classes), nn.Dropout(dropout)

    def enrol(self, bags, instances):
        self.register_buffer("seen", torch.zeros(bags))
        self.register_buffer("trust", torch.zeros(instances))

    def forward(self, h, segments):
        z = self.classifier(self.dropout(h))
        bag = self.masked_log_softmax(segments.mean(z.softmax(1)) / 0.1)
        return Output(z, bag, {"echo": self.echo(self.dropout(h))})

    def mass(self, batch):
        return super().loss_weight(batch) if batch.over == "bags" else torch.tensor(len(batch.position))

    def loss(self, output, batch, teacher=None):
        if teacher is None:
            return nll(output.bag, batch.target)
        with torch.no_grad():
            if batch.over == "bags":
                self.seen.index_add_(0, batch.bag, torch.ones_like(batch.bag, dtype=torch.float32))
            first = slice(0, len(batch.position) // batch.views)
            sure = teacher.instance.softmax(1).amax(1)
            self.trust.index_copy_(0, batch.position[first], sure[first])
        if batch.over == "bags":
            return nll(output.bag, batch.target)
        log_p = output.parts["echo"].log_softmax(1)
        return (self.trust[batch.position] * -(teacher.instance.softmax(1) * log_p).sum(1)).mean()
