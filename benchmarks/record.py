"""The JSON document of a device: what was measured, on which machine, by which versions, and when."""

from __future__ import annotations

import datetime as dt
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import Case
from benchmarks.measure import Measured, Row
from experiments.engine.runs import commit

__all__ = ["Record"]

PEERS = ("holonomy", "torch", "geoopt", "torch_geometric", "triton")


class Record:
    """A file that is written after every case: a run that was killed goes on where it stopped.

    Cases are kept beside each other; one that is measured again takes the place of its former self. A document that
    another machine or other versions made is begun anew.
    """

    def __init__(self, path: Path, device: torch.device, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = settings
        head = {"machine": _machine(device), "versions": _versions()}
        command = "python -m benchmarks NAME --seconds S, for each case with its own S"
        self.document: dict[str, Any] = {"command": command} | head | {"unfinished": [], "cases": {}}
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if all(before[key] == value for key, value in head.items()):
                self.document = before

    def ask(self, names: list[str], *, fresh: bool) -> list[str]:
        """What is to be measured: the names, or what a killed run with the same names left of them."""
        left = self.document["unfinished"]
        asked = left if left and set(left) <= set(names) and not fresh else names
        self.document["unfinished"] = list(asked)
        self._write()
        return list(asked)

    def keep(self, case: Case, threads: dict[int, tuple[dict[int, Measured], list[Row]]]) -> None:
        """Put a case's numbers into the file, which is written whole or not at all."""
        of_threads = {str(count): {"rows": [_plain(row) for row in rows], "turns": _turns(found)}
                      for count, (found, rows) in threads.items()}  # fmt: skip
        today = dt.datetime.now(dt.UTC).date().isoformat()
        self.document["cases"][case.name] = {
            "title": case.title, "unit": case.unit, "date": today, "commit": commit(), "settings": self.settings,
            "threads": of_threads,
        }  # fmt: skip
        self.document["unfinished"] = [name for name in self.document["unfinished"] if name != case.name]
        self._write()

    def _write(self) -> None:
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)


def _plain(row: Row) -> dict[str, Any]:
    return {**row._asdict(), "met": row.met}


def _turns(found: dict[int, Measured]) -> dict[str, Any]:
    """Seconds (median) and bytes of each contender; absolute, and so comparable within a case only."""
    return {
        str(size): {
            name: {"seconds": sorted(seconds)[len(seconds) // 2], "rounds": len(seconds)}
            | ({"peak_bytes": at.memory[name].peak, "result_bytes": at.memory[name].results} if at.memory else {})
            for name, seconds in at.seconds.items()
        }
        for size, at in found.items()
    }


def _machine(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device)}
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {"device": model or platform.processor() or platform.machine(), "cores": torch.get_num_threads()}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
