"""The software bill of materials (CycloneDX 1.6, JSON) of the installed distributions on which headcount depends: ``make sbom``.

Known vulnerabilities are looked up by any scanner that reads it; all of them need the network for their database.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

NAME = "headcount"


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def dependencies(name: str, extras: set[str]) -> set[str]:
    """The distributions that this one requires here."""
    requirements = [Requirement(text) for text in distribution(name).requires or ()]
    wanted = [r for r in requirements if not r.marker or any(r.marker.evaluate({"extra": e}) for e in ("", *extras))]
    return {normalized(r.name) for r in wanted}


def bill(extras: set[str]) -> dict:
    tree, waiting = {}, [NAME]
    while waiting:
        name = waiting.pop()
        try:
            tree[name] = dependencies(name, extras if name == NAME else set()) - {name}
        except PackageNotFoundError:  # an optional one that is not installed
            continue
        waiting += [d for d in tree[name] if d not in tree]
    references = {name: f"pkg:pypi/{name}@{distribution(name).version}" for name in tree}
    components = [component(name, references[name]) for name in sorted(tree) if name != NAME]
    graph = [
        {"ref": references[n], "dependsOn": sorted(references[d] for d in tree[n] if d in references)} for n in sorted(tree)
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**component(NAME, references[NAME]), "type": "application"}},
        "components": components,
        "dependencies": graph,
    }


def component(name: str, reference: str) -> dict:
    metadata = distribution(name).metadata
    licence = metadata.get("License-Expression")
    entry = {"type": "library", "bom-ref": reference, "name": name, "version": metadata["Version"], "purl": reference}
    return entry | ({"licenses": [{"expression": licence}]} if licence else {})


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "dist/headcount.cdx.json")
    data = bill(set(sys.argv[2:]) or {"ray", "slides", "onnx"})
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{out}: {len(data['components'])} components")
