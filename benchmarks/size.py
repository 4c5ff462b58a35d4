"""Bags of any size: memory and time of one bag of up to a million instances, and the pace beside torchmil's ABMIL.

    python benchmarks/size.py --out benchmarks/results/size-cpu.json

Features lie in a mapped file; one bag holds all of them. Each measurement is a fresh process, so that its peak of resident
memory is its own; what Python and torch take before anything is done is measured too.

The comparison needs torchmil 1.0.2, which is never a dependency of headcount. Put it beside, not into the environment:

    pip install --no-deps --target /tmp/torchmil torchmil==1.0.2 tensordict torchmetrics lightning-utilities einops tqdm \\
        pandas cloudpickle orjson pyvers importlib_metadata zipp python-dateutil pytz tzdata six h5py
    TORCHMIL=/tmp/torchmil python benchmarks/size.py --out benchmarks/results/size-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
DIM, CHUNK = 512, 1 << 14


def main() -> None:
    asked = arguments()
    if asked.measure:
        print(json.dumps({"pace": pace, "fit": of_fit, "predict": of_predict}[asked.measure](asked)))
        return
    found: dict[str, Any] = {"machine": platform.machine(), "chunk_instances": CHUNK, "features": DIM, "rows": []}
    with tempfile.TemporaryDirectory(dir=asked.scratch) as folder:
        for dtype in ("float16", "float32"):
            for size in asked.sizes:
                if dtype == "float16" and size < max(asked.sizes):
                    continue  # the growth is shown for float32
                file = write(Path(folder) / "features.npy", size, dtype)
                for measure in ("fit", "predict"):
                    row = apart(measure, asked.device, file=str(file))
                    found["rows"].append({"what": measure, "instances": size, "dtype": dtype, **row})
                    print(json.dumps(found["rows"][-1]), flush=True)
    found["pace"] = apart("pace", asked.device)
    tell(found)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=lambda s: [int(float(n)) for n in s.split(",")], default=SIZES)
    parser.add_argument("--scratch", help="where the mapped file lies while it is measured (2 GB)")
    parser.add_argument("--measure", help="only one of pace, fit and predict (with --file), as a line of JSON")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    return parser.parse_args()


def write(file: Path, size: int, dtype: str) -> Path:
    rng, out = np.random.default_rng(0), np.lib.format.open_memmap(file, "w+", dtype, (size, DIM))
    for start in range(0, size, CHUNK):
        part = out[start : start + CHUNK]
        part[:] = rng.standard_normal(part.shape, dtype=np.float32)
    out.flush()
    return file


def apart(measure: str, device: str, **more: str) -> dict[str, Any]:
    words = [w for k, v in more.items() for w in (f"--{k}", v)]
    command = [sys.executable, __file__, "--measure", measure, "--device", device, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak_mib() -> float:
    """Of this process alone: getrusage would begin with what the parent had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024, 1)


# -- one bag of everything ----------------------------------------------------------------------------------------------------


def ready(asked: argparse.Namespace) -> tuple[Any, Any, Any, float]:
    import torch

    from headcount.bags import Bags, Pool
    from headcount.experiments.recipe import Recipe
    from headcount.models.network import build_model
    from headcount.training import accel

    device = accel.resolve_device(asked.device)
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)  # libraries are loaded now, not in what follows
    before = peak_mib()
    bags = Bags.of(Pool.from_npy(asked.file), sizes=[len(np.load(asked.file, mmap_mode="r"))], labels=[1], classes=10)
    recipe = Recipe(backbone="mlp", epochs=1, chunk_instances=CHUNK)
    return build_model(recipe.model_config(bags), bags, seed=recipe.seed).to(device), bags, recipe, before


def of_fit(asked: argparse.Namespace) -> dict[str, Any]:
    """An epoch of training on the bag and its validation on it: it is read three times."""
    from headcount.training.trainer import Trainer

    model, bags, recipe, before = ready(asked)
    state = Trainer(model, bags, bags, recipe.train_config)
    clock = Clock()
    loss = state.train_epoch(0).item()
    train = clock.read()
    state.valid_loss().item()
    waited = round(state.train_loader.stall_seconds + state.valid_loader.stall_seconds, 3)
    return {**clock.read(), "train": train, "waited_seconds": waited, "loss": loss, **memory(before, asked)}


def of_predict(asked: argparse.Namespace) -> dict[str, Any]:
    from headcount.models.predictions import predict

    model, bags, _, before = ready(asked)
    clock = Clock()
    said = predict(model, bags, batch_instances=CHUNK)
    assert len(said.instance) == len(bags.index)
    return {**clock.read(), **memory(before, asked)}


class Clock:
    """Of the wall, and of this process alone: the one that does not mind what else the machine is doing."""

    def __init__(self) -> None:
        self.wall, self.own = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        wall, own = time.perf_counter() - self.wall, time.process_time() - self.own
        return {"seconds": round(wall, 3), "cpu_seconds": round(own, 3)}


def memory(before: float, asked: argparse.Namespace) -> dict[str, Any]:
    import torch

    found = {"peak_mib": peak_mib(), "before_mib": before, "file_mib": round(os.path.getsize(asked.file) / 2**20, 1)}
    if torch.device(asked.device).type == "cuda":
        found["gpu_peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return found


# -- beside torchmil ----------------------------------------------------------------------------------------------------------


def pace(asked: argparse.Namespace) -> dict[str, Any]:
    """Instances trained per second: attention pooling over 512 features, Adam, ragged bags in memory, both in this process."""
    import torch

    from headcount.bags import Bags, Pool
    from headcount.training import accel

    rng = np.random.default_rng(0)
    sizes = rng.integers(500, 2000, 64)
    x = rng.standard_normal((int(sizes.sum()), DIM), dtype=np.float32)
    labels = rng.integers(0, 2, len(sizes))
    device = accel.resolve_device(asked.device)
    bags = Bags.of(Pool(x), sizes=sizes, labels=labels, classes=2).to(device)
    torchmil, why = found_torchmil()
    out: dict[str, Any] = {"instances": len(x), "bags": len(sizes), "threads": torch.get_num_threads()}
    out["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
    out["device"] = accel.device_name(device)
    for batch in (1, 8):
        rounds = {"ours": ours(bags, batch, device)}
        if torchmil:
            rounds["torchmil"] = theirs(bags, batch, device)
        best: dict[str, float] = dict.fromkeys(rounds, float("inf"))
        # on the CPU the process's own time: what else the machine does is no part of it
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        for _ in range(9):  # in turn, the best of nine
            for name, epoch in rounds.items():
                began = clock()
                epoch()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                best[name] = min(best[name], clock() - began)
        out[f"batch_{batch}"] = {name: round(len(x) / seconds) for name, seconds in best.items()}
        if torchmil:
            out[f"batch_{batch}"]["ratio"] = round(best["torchmil"] / best["ours"], 2)
    return out if torchmil else {**out, "torchmil": why}


def found_torchmil() -> tuple[bool, str]:
    sys.path += [os.environ["TORCHMIL"]] if "TORCHMIL" in os.environ else []
    try:
        import torchmil.models
        import torchmil.utils  # noqa: F401

        return True, ""
    except ImportError as e:
        return False, f"not compared: {e}; the top of {Path(__file__).name} says how to get torchmil"


def ours(bags: Any, batch: int, device: Any) -> Any:
    from headcount.experiments.recipe import Recipe
    from headcount.models.network import Model, ModelConfig
    from headcount.training.trainer import Trainer

    recipe = Recipe(backbone="linear", head="attention", batch_bags=batch, lr=1e-4, chunk_instances=CHUNK)
    model = Model(ModelConfig((DIM,), bags.classes, "linear", head="attention")).to(device)
    state = Trainer(model, bags, bags.take([0]), recipe.train_config)
    return lambda: state.train_epoch(0)


def theirs(bags: Any, batch: int, device: Any) -> Any:
    """torchmil's own model, collate function and training loop, with its progress bar off."""
    import torch
    from torchmil.data import collate_fn
    from torchmil.models import ABMIL
    from torchmil.utils import Trainer

    ends, data, label = bags.offsets.tolist(), bags.pool.data.cpu(), bags.label.cpu()
    made = [{"X": data[a:b], "Y": label[i]} for i, (a, b) in enumerate(pairwise(ends))]
    loader = torch.utils.data.DataLoader(made, batch, shuffle=True, collate_fn=collate_fn)
    model = ABMIL(in_shape=(DIM,), att_dim=128)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    trainer = Trainer(model, optimizer, device=str(device), disable_pbar=True, verbose=False)
    return lambda: trainer._shared_loop(loader, mode="train")


def tell(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        per_million = 1e6 * row["cpu_seconds"] / row["instances"]
        own = row["peak_mib"] - row["before_mib"]
        print(
            f"{row['what']:8} {row['instances']:9,} x {DIM} {row['dtype']}: {row['seconds']:7.2f} s "
            f"({per_million:.1f} CPU s per million), peak {row['peak_mib']:.0f} MiB resident, {own:.0f} of it its own, "
            f"file {row['file_mib']:.0f} MiB"
        )
    for name, both in found["pace"].items():
        if name.startswith("batch"):
            print(f"{name}: {', '.join(f'{k} {v:,}' for k, v in both.items())} (instances per second)")
    if "torchmil" in found["pace"]:
        print(found["pace"]["torchmil"])


if __name__ == "__main__":
    main()
