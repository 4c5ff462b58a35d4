"""A custom head that uses everything the training loop offers: two views, a teacher, a pass over bags and one over single
instances with their own optimizers, and memory per bag and per instance."""

import torch
from torch import nn

from headcount.models.heads import Head, Output, Pass, Teacher, nll


class Toy(Head):
    """Votes of two linear layers; the second learns from single instances and from the teacher."""

    title = "Toy"
    views = 2
    teacher = Teacher(0.9)
    passes = (Pass("bags", ("backbone", "head.classifier")), Pass("instances", ("backbone", "head.student")))

    def __init__(self, dim, classes, counted=None, *, dropout=0.2):
        super().__init__(dim, classes, counted)
        self.classifier, self.student = nn.Linear(dim, classes), nn.Linear(dim, classes)
        self.dropout = nn.Dropout(dropout)

    def setup(self, segments, target):
        self.register_buffer("bag_visits", torch.zeros(segments.n_bags))
        self.register_buffer("confidence", torch.zeros(len(segments.index)))

    def forward(self, h, segments):
        z = self.classifier(self.dropout(h))
        bag = self.masked_log_softmax(segments.mean(z.softmax(1)) / 0.1)
        return Output(z, bag, {"student": self.student(self.dropout(h))})

    def loss_weight(self, batch):
        return super().loss_weight(batch) if batch.over == "bags" else torch.tensor(len(batch.position))

    def loss(self, output, batch, teacher=None):
        if teacher is None:
            return nll(output.bag, batch.target)
        with torch.no_grad():
            if batch.over == "bags":
                self.bag_visits.index_add_(0, batch.bag, torch.ones_like(batch.bag, dtype=torch.float32))
            first = slice(0, len(batch.position) // batch.views)
            confidence = teacher.instance.softmax(1).amax(1)
            self.confidence.index_copy_(0, batch.position[first], confidence[first])
        if batch.over == "bags":
            return nll(output.bag, batch.target)
        log_p = output.parts["student"].log_softmax(1)
        return (self.confidence[batch.position] * -(teacher.instance.softmax(1) * log_p).sum(1)).mean()
