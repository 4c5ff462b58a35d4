"""Count the frames of this package between an entry point and the work it ends in.

    python benchmarks/call_depth.py

Two walks are traced on the digits: from ``headcount run`` (and from ``train``) to ``loss.backward()``, and from ``predict`` (and
``FittedModel.predict``) to the network's ``forward``. Each frame is printed as file, line and function. Comprehensions are left out:
only Python 3.11 gives them frames of their own.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headcount as hc
from headcount.cli import main as cli
from headcount.majority.transition import Transition, mix_from_shares

PACKAGE = str(Path(hc.__file__).parent)
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")


class _Reached(BaseException):
    """Raised at the end of the walk, so that nothing after it runs."""


def trace(walk: Callable[[], Any], owner: Any, name: str) -> list[str]:
    """The package's frames that are active when ``owner.name`` is first called during ``walk``, outermost first."""
    frames: list[str] = []
    original = getattr(owner, name)

    def stop(*_: Any, **__: Any) -> None:
        for frame in traceback.extract_stack():
            if frame.filename.startswith(PACKAGE) and frame.name not in COMPREHENSIONS:
                frames.append(f"{Path(frame.filename).relative_to(PACKAGE)}:{frame.lineno} {frame.name}")
        raise _Reached

    setattr(owner, name, stop)
    try:
        walk()
    except _Reached:
        pass
    finally:
        setattr(owner, name, original)
    return frames


def main() -> None:
    protocol = hc.Protocol(bag_size=24, train_bags=20)
    bags = hc.majority_bags(hc.load_source("digits"), fold=0, protocol=protocol)
    train, valid = bags["train"].blind(), bags["valid"].blind()
    model = hc.build_model(hc.ModelConfig.for_bags(train, backbone="mlp"), train)
    dataset = hc.read([[[0.0], [1.0]], [[2.0], [3.0]]], labels=["a", "b"])
    network = hc.build_model(hc.ModelConfig.for_bags(dataset.to_bags(), backbone="mlp"), dataset.to_bags())
    transition = Transition(mix_from_shares(0.6, 2), torch.full((2,), 0.5))
    fitted = hc.FittedModel(network, dataset.bags.classes, dataset.fit_preprocessor(), transition)
    with tempfile.TemporaryDirectory() as out:
        words = f"run --out {out} --source digits --bag-size 24 --epochs 1 --set backbone=mlp --set train_bags=20"

        def command() -> None:
            sys.argv = ["headcount", *words.split()]
            cli.app(standalone_mode=False)

        def training() -> None:
            hc.train(model, train, valid, hc.TrainConfig(epochs=1))

        def prediction() -> None:
            hc.predict(model, bags["test"])

        def fitted_prediction() -> None:
            fitted.predict(dataset)

        walks: list[tuple[str, Callable[[], None], Any, str]] = [
            ("headcount run -> loss.backward()", command, torch.Tensor, "backward"),
            ("train -> loss.backward()", training, torch.Tensor, "backward"),
            ("predict -> the network's forward", prediction, type(model.backbone), "forward"),
            ("FittedModel.predict -> the network's forward", fitted_prediction, type(model.backbone), "forward"),
        ]
        for title, walk, owner, name in walks:
            frames = trace(walk, owner, name)
            print(f"{title}: {len(frames)} frames")
            print("\n".join(f"  {frame}" for frame in frames))


if __name__ == "__main__":
    main()
