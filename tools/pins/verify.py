"""Check a kernel before its code runs: is its folder what the publisher pinned, and nothing besides?

    variant = kernels.install_kernel("org/optimizer", revision="<40 hex digits>", trust_remote_code=True)
    verify(variant, pin)
    optimizer = kernels.get_local_kernel(variant)

`install_kernel` downloads and imports nothing. A pin is the sha256 of a variant's metadata.json, whose digest covers
every other file. It has to come from the publisher: whoever can change a download can change its metadata.json, too.
Copy this file to use it: it is one file, longer than the others here, and needs the standard library alone. By hand:
`python verify.py FOLDER --pins optimizer.pins.json`. What is written into the folder after the check, it cannot see.
docs/verification.md of the optimizer's repository says what is refused, and why.
"""

from __future__ import annotations

import argparse
import base64
import bisect
import hashlib
import importlib.util
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

METADATA, SIGNATURE, CACHE = "metadata.json", "metadata.json.sigstore", "__pycache__"
LIBRARIES = {".so", ".pyd", ".dll", ".dylib"}
LARGEST_METADATA, LARGEST = 2**20, 2**30
# The folders from which kernels 0.17.2 chooses: for a backend on every machine, and compiled for one kind of machine.
VARIANT = re.compile(
    r"torch-(?P<noarch>cann|cpu|cuda|metal|neuron|npu|rocm|tpu|universal|xpu)"
    r"|(?:torch-stable-abi[0-9]+|torch[0-9]+(?:-cxx11|-cxx98)?|tvm-ffi[0-9]+)"
    r"-(?P<compiled>cpu|metal|neuron|tpu|(?:cann|cu|rocm|xpu)[0-9]+)-[A-Za-z0-9_]+-[a-z]+"
)


class VerificationError(Exception):
    """A variant must not be loaded; the message has every reason, a line each."""


def verify(variant: Path | str, pin: str | Mapping[str, str]) -> Path:
    """Delete Python's caches of bytecode from a variant if all else is as pinned, and return its folder.

    `pin` is this variant's, or a mapping from variants' names to pins. Bytecode in `__pycache__` runs instead of the
    sources, and no digest covers it, but each program that loads a variant writes it. So it goes: a restart verifies.
    With PYTHONPYCACHEPREFIX this process keeps it elsewhere, and it goes there.

    Raises VerificationError with every fault. One is that this process has loaded another folder's code of this id.
    """
    folder = Path(variant).absolute()
    reasons, bytecode = _examined(folder, pin if isinstance(pin, Mapping) else {folder.name: pin}, dict(sys.modules))
    for file in [] if reasons else bytecode:
        try:
            _delete(file)
        except OSError as error:
            reasons = [f"{_shown(file)} is bytecode that cannot be deleted: {error.strerror}"]
            break
    if reasons:
        raise VerificationError("\n  ".join([f"{folder} must not be loaded:", *reasons]))
    return folder


def faults(variant: Path | str, pin: str | Mapping[str, str] | None = None) -> list[str]:
    """Return a line for each reason not to load a variant, bytecode included; change nothing.

    Without a pin the lines say where files and names disagree with metadata.json; none is no proof of their origin.
    """
    folder = Path(variant).absolute()
    reasons, bytecode = _examined(folder, pin if isinstance(pin, (Mapping, type(None))) else {folder.name: pin})
    return reasons + [
        f"{_shown(str(file).removeprefix(f'{folder}{os.sep}'))} is bytecode, which runs instead of its source"
        for file in bytecode
    ]


def pin_of(variant: Path | str) -> str:
    """Return the sha256 of a variant's metadata.json in 64 hexadecimal digits: a pin if the publisher calls this."""
    return hashlib.sha256((Path(variant) / METADATA).read_bytes()).hexdigest()


def backend_of(name: str) -> str | None:
    """Return the backend, such as "cuda", in the name of a variant; None if the loader takes no folder of that name."""
    matched = VARIANT.fullmatch(name)
    backend = matched and (matched["noarch"] or matched["compiled"].rstrip("0123456789"))
    return {"cu": "cuda", "npu": "cann"}.get(backend, backend)


def _examined(variant: Path, pins: Mapping | None, modules: Mapping = {}) -> tuple[list[str], list[Path]]:
    """Return all faults but bytecode where Python looks for it, and that. What cannot be read is a fault."""
    blobs = variant.parents[3] / "blobs" if variant.parts[-4:-3] == ("snapshots",) else None
    folders = [variant, *list(variant.parents)[:4], blobs] if blobs else [variant]  # Python 3.9 slices no parents
    reasons, bytecode = [f"{_shown(folder)} is a link" for folder in folders if os.path.islink(folder)], []
    try:
        _hashed(variant / METADATA, blobs, LARGEST_METADATA)  # a file of that size, or a blob
        content = (variant / METADATA).read_bytes()
        metadata, files = _parsed(content)
        reasons.extend(_pin_faults(variant, hashlib.sha256(content).hexdigest(), pins) if pins is not None else ())
        reasons.extend(_name_faults(variant.name, metadata, files))
        reasons.extend(_module_faults(variant, metadata.get("id"), modules))
        reasons.extend(_file_faults(variant, files, blobs, bytecode))
        bytecode.extend(_bytecode_elsewhere(variant, files))
    except OSError as error:
        reasons.append(f"{_shown(error.filename)} cannot be read: {error.strerror}")
    except ValueError as error:
        reasons.append(f"{METADATA} {error}")
    return reasons, bytecode


def _parsed(content: bytes) -> tuple[dict, dict[str, str]]:
    """Return what metadata.json says, and its digest of each file; ValueError if that is not to be had."""
    try:
        metadata = json.loads(content.decode())
        digest = metadata["digest"]
        if digest["algorithm"] != "sha256":
            raise ValueError(f"the digest is by {digest['algorithm']}, not sha256")
        return metadata, {**digest["files"]}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"has no digest that can be checked: {_shown(repr(error))}") from None


def _pin_faults(variant: Path, actual: str, pins: Mapping[str, str]) -> Iterator[str]:
    if variant.name not in pins:
        yield f"{_shown(variant.name)} has no pin; there are pins of {_shown(', '.join(pins) or 'nothing')}"
    elif actual != pins[variant.name]:
        yield f"{METADATA} has the sha256 {actual}, and the pin is {_shown(pins[variant.name])}"
    # The loader looks into the folder above `build` first.
    folders = [variant.parent, *([variant.parents[1]] if variant.parent.name == "build" else [])]
    for path in sorted(path for folder in folders for path in folder.iterdir() if backend_of(path.name)):
        if path.is_dir() and (path.parent != variant.parent or path.name not in {variant.name, *pins}):
            name = os.path.relpath(path, variant.parent)
            yield f"{name} lies beside it without a pin, and the loader might prefer it"


def _name_faults(folder: str, metadata: dict, files: Iterable[str]) -> Iterator[str]:
    """Where folder, backend, namespace of the operators and library disagree; dependencies."""
    name, ops, backend = (metadata.get(key) for key in ("name", "id", "backend"))
    backend = backend.get("type") if isinstance(backend, dict) else None
    if backend_of(folder) is None or backend != backend_of(folder):
        yield f"{_shown(folder)} is not the folder of a variant for {_shown(backend)}, the backend in {METADATA}"
    namespace = f"_{name}_{backend}_".replace("-", "_")
    if not re.fullmatch(re.escape(namespace) + "[0-9a-f]{7,40}(_dirty)?", str(ops)):
        yield f"the id is {_shown(ops)}, not {_shown(namespace)} and a revision"
    libraries = [file for file in files if PurePosixPath(file).suffix in LIBRARIES]
    if [library.split(".")[0] for library in libraries] != ([] if folder.count("-") == 1 else [ops]):
        yield f"the libraries are {_shown(', '.join(libraries) or 'none')}, and the id is {_shown(ops)}"
    for key in ("python-depends", "kernel-depends"):
        if metadata.get(key):
            yield f"{key} asks for code that no pin covers: {_shown(metadata[key])}"


def _module_faults(variant: Path, ops: object, modules: Mapping) -> Iterator[str]:
    """The id names modules for the loader, and so modules of another folder would run in place of the variant's."""
    files = [getattr(module, "__file__", None) for name, module in modules.items() if f"{name}.".startswith(f"{ops}.")]
    folders = {os.path.realpath(os.path.dirname(file)) for file in files if file}
    elsewhere = [folder for folder in folders if not Path(folder).is_relative_to(os.path.realpath(variant))]
    yield from [f"code of this id is loaded from {_shown(min(elsewhere))}: start a new process"] if elsewhere else []


def _file_faults(variant: Path, digest: Mapping[str, str], blobs: Path | None, bytecode: list[Path]) -> Iterator[str]:
    """Where the files are not those of the digest; what is in `__pycache__` goes into `bytecode`."""
    names, waiting, missing = sorted(digest), [variant], set(digest)
    for folder in waiting:
        for path in sorted(folder.iterdir()):
            name, is_folder = path.relative_to(variant).as_posix(), stat.S_ISDIR(path.lstat().st_mode)
            missing.discard(name)
            if is_folder and path.name == CACHE:
                bytecode.extend(sorted(path.iterdir()))
            elif is_folder and _begins_a_name(f"{name}/", names):
                waiting.append(path)
            else:
                fault = _file_fault(path, name, digest.get(name), blobs)
                yield from [f"{_shown(name)} {fault}"] if fault else []
    yield from (f"{_shown(name)} is missing" for name in sorted(missing))


def _begins_a_name(start: str, names: list[str]) -> bool:
    """Whether one of the sorted `names` begins with `start`. A forger's names may be many, and of any length."""
    place = bisect.bisect_left(names, start)
    return place < len(names) and names[place].startswith(start)


def _bytecode_elsewhere(variant: Path, files: Iterable[str]) -> Iterator[Path]:
    """What this Python runs instead of the sources, in the folder that PYTHONPYCACHEPREFIX names."""
    for name in files if sys.pycache_prefix else ():
        file = Path(importlib.util.cache_from_source(str(variant / name)))
        if os.path.lexists(file):
            yield file


def _file_fault(path: Path, name: str, digest: str | None, blobs: Path | None) -> str | None:
    if path.suffix == ".pyc":
        return f"is bytecode outside of {CACHE}, which runs without a source"
    if digest is None and name not in (METADATA, SIGNATURE):
        return "is not in the digest"
    try:
        actual = _hashed(path, blobs, LARGEST_METADATA if digest is None else LARGEST)
    except ValueError as error:
        return str(error)
    same = digest in (None, base64.b64encode(actual).decode())
    return None if same else "is not what the digest says: its sha256 differs"


def _hashed(path: Path, blobs: Path | None, largest: int) -> bytes:
    """Return the sha256 of a file, or of the blob that it is in the Hub client's cache; ValueError if it is neither."""
    file = path
    if path.is_symlink():
        link = os.readlink(path)
        file = path if blobs is None else blobs / os.path.basename(link)
        # As the client writes it, letter by letter: any other way there may lead elsewhere later, as /proc/self/cwd.
        if blobs is None or link != os.path.relpath(file, path.parent):
            raise ValueError(f"is a link to {_shown(link)}, and not to a blob as the Hub's client writes it")
    about = file.lstat()
    if not stat.S_ISREG(about.st_mode) or about.st_size > largest:
        raise ValueError(f"is not a regular file of at most {largest} bytes")
    sha256, sha1 = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % about.st_size, usedforsecurity=False)
    with file.open("rb") as opened:
        while piece := opened.read(LARGEST_METADATA):
            sha256.update(piece)
            sha1.update(piece)
    if file != path and file.name not in (sha1.hexdigest(), sha256.hexdigest()):
        raise ValueError(f"is a link to the blob {_shown(file.name)}, whose content has another hash")
    return sha256.digest()


def _delete(file: Path) -> None:
    """Delete a file. A link that has taken its folder's place is not followed; one that is further up would be."""
    try:
        if os.unlink not in os.supports_dir_fd:
            file.unlink()
            return
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.unlink(file.name, dir_fd=folder)
        finally:
            os.close(folder)
    except FileNotFoundError:
        pass  # another process that verifies was faster


def _shown(value: object) -> str:
    """Return somebody else's value as one line that any terminal can show."""
    return ascii(str(value))[1:-1][:300]


def main() -> int:
    parser = argparse.ArgumentParser(description="Verify a variant, or every one in a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pins", type=Path, help="the publisher's file; without it files and digest are compared")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    try:
        pins = {**json.loads(arguments.pins.read_text())["variants"]} if arguments.pins else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        parser.error(f"{arguments.pins} is no file of pins: {error!r}")
    alone = os.path.lexists(folder / METADATA) or not os.path.isdir(folder)
    inside = [] if alone else sorted(path for path in folder.glob("*") if backend_of(path.name))
    reasons = {variant: faults(variant, pins) for variant in inside or [folder]}
    for variant, lines in reasons.items():
        print(f"{variant.name}: {'refused' if lines else f'intact, pin {pin_of(variant)}'}", *lines, sep="\n  ")
    return int(any(reasons.values()))


if __name__ == "__main__":
    sys.exit(main())
