"""The files of tuned configurations, which `kernels/speeds/measurements.py` of the package reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.lab.records import write_whole


def file_of(folder: Path, device_name: str) -> Path:
    """Return where a device's configurations are."""
    return folder / f"{device_name.replace(' ', '_')}.json"


def read_entries(folder: Path, device_name: str, kernel: str, dtype: str) -> list[dict]:
    """Return the entries of a file for a kernel and dtype; none if there is no file."""
    file = file_of(folder, device_name)
    return json.loads(file.read_text()).get(kernel, {}).get(dtype, []) if file.exists() else []


def write_entry(folders: Sequence[Path], header: dict, kernel: str, dtype: str, entry: dict) -> None:
    """Write an entry into the device's file in each folder, replacing one of the same size.

    `header` is the file's header, with the device's name under "device".
    """
    for folder in folders:
        file = file_of(folder, header["device"])
        content = json.loads(file.read_text()) if file.exists() else {}
        table = content.get(kernel, {})
        others = [old for old in table.get(dtype, []) if (old["m"], old["k"]) != (entry["m"], entry["k"])]
        entries = sorted([*others, entry], key=lambda e: (e["m"], e["k"]))
        content = {**content, **header, kernel: {**table, dtype: entries}}
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(content, indent=1) + "\n")


def withdraw(folders: Sequence[Path], device_name: str, of: tuple[str, str], is_wrong: Callable[[dict], bool]) -> None:
    """Remove wrong entries of a kernel and dtype from the device's file in each folder."""
    kernel, dtype = of
    for folder in folders:
        entries = read_entries(folder, device_name, kernel, dtype)
        if any(map(is_wrong, entries)):
            file = file_of(folder, device_name)
            content = json.loads(file.read_text())
            content[kernel][dtype] = [entry for entry in entries if not is_wrong(entry)]
            write_whole(file, json.dumps(content, indent=1) + "\n")
