"""Caches of the Hub's client that are not what was downloaded: a table of named changes.

`CACHES` has their names and functions, which take the folder of a repository. `TODAY` says what kernels 0.17.2 does
with each, offline and without a check: "foreign" code runs, the kernel "loads" in silence, an "error" tells of
something, or the process is "killed".
"""

from __future__ import annotations

import json
import sys
import sysconfig

from tests.support.attacks.odd_tampering import (
    another_hard_link,
    blob_by_another_name,
    device,
    folder,
    foreign_library,
    forged_variant_inside,
    linked_blob,
    linked_blobs,
    linked_by,
    linked_repository,
    other_snapshot,
    other_variant_inside,
    past_the_blobs,
    pipe,
    raw,
    renamed,
    sparse,
    swapped,
    with_a_socket,
    with_digest,
)
from tests.support.attacks.tampering import (
    cached,
    described,
    digested,
    digested_again,
    edited,
    edited_blob,
    in_order,
    linked,
    linked_folder,
    linked_outside,
    planted,
    removed,
    variant_in,
    without_listing,
    written,
)
from tests.support.compiled_variants import FOREIGN, NAME, OPS

LIBRARY_FILE = f"{OPS}.abi3.so"
# Such as ".cpython-311-x86_64-linux-gnu.so", which Python looks for first.
EXTENSION = sysconfig.get_config_var("EXT_SUFFIX")
OPTIMIZED = f"scaling.{sys.implementation.cache_tag}.opt-2.pyc"
# Python would never run these, or only until the sources are compiled again: `verify` deletes them.
DELETED = [
    ("bytecode, its hash unchecked", "foreign", cached("scaling.py")),
    ("bytecode, its source's time right", "foreign", cached("scaling.py", unchecked=False)),
    ("bytecode of a package inside", "foreign", cached("shapes/__init__.py")),
    (
        "optimized bytecode",
        "loads",
        cached("scaling.py", to=f"__pycache__/{OPTIMIZED}"),
    ),
    ("bytecode of another Python", "loads", cached("scaling.py", to="__pycache__/scaling.cpython-399.pyc")),
    ("a pipe in __pycache__", "loads", in_order(written("__pycache__/a", ""), pipe("__pycache__/b"))),
    ("a library in __pycache__", "loads", foreign_library("__pycache__/more.abi3.so")),
    ("a link in __pycache__", "loads", in_order(written("__pycache__/a", ""), linked("__pycache__/b", "/etc"))),
]
BYTECODE = [
    ("a folder in __pycache__", "loads", in_order(written("__pycache__/a", ""), folder("__pycache__/b"))),
    ("a package of bytecode in front of a module", "foreign", cached("scaling.py", to="scaling/__init__.pyc")),
    (
        "bytecode in place of a module",
        "foreign",
        in_order(cached("scaling.py", to="scaling.pyc"), removed("scaling.py"), without_listing),
    ),
    ("bytecode of a module that is not there", "loads", cached("scaling.py", to="more.pyc")),
    (
        "a link to bytecode elsewhere",
        "foreign",
        in_order(cached("scaling.py"), linked_folder(lambda cache: variant_in(cache) / "__pycache__")),
    ),
]
CODE = [
    ("an edited module", "foreign", edited("scaling.py")),
    ("an edited module inside", "foreign", edited("shapes/square.py")),
    ("an edited __init__", "foreign", edited("__init__.py")),
    ("an edited _ops", "foreign", edited("_ops.py")),
    ("an edited blob", "foreign", edited_blob("scaling.py", lambda code: code + FOREIGN.encode())),
    ("an edited blob of the same length", "loads", edited_blob("scaling.py", lambda code: code.replace(b"2", b"3"))),
    ("an edited module and a new digest", "foreign", in_order(edited("scaling.py"), digested_again)),
    (
        "an edited module and no digest",
        "foreign",
        in_order(edited("scaling.py"), described(lambda said: {**said, "digest": None})),
    ),
    (
        "an edited module out of the digest",
        "foreign",
        in_order(
            edited("scaling.py"), digested(lambda files: {name: files[name] for name in files if "sc" not in name})
        ),
    ),
    ("an empty line more", "loads", edited("scaling.py", lambda text: text + "\n")),
    ("emptied data", "loads", edited("data.json", lambda text: "")),
    ("a removed module", "error", removed("scaling.py")),
    ("a removed module, not noted", "error", in_order(removed("scaling.py"), without_listing)),
    ("removed data, not noted", "loads", in_order(removed("data.json"), without_listing)),
    ("modules exchanged", "error", swapped("scaling.py", "shapes/square.py")),
]
IN_FRONT = [
    ("a package in front of a module", "foreign", written("scaling/__init__.py", f"{FOREIGN}scale = None\n")),
    ("a library in front of a module", "foreign", foreign_library("scaling.abi3.so")),
    ("a library for this Python in front of a module", "foreign", foreign_library(f"scaling{EXTENSION}")),
    ("a library for this Python in front of the library", "foreign", foreign_library(f"{OPS}{EXTENSION}")),
    ("a package in front of the library", "foreign", written(f"{OPS}/__init__.py", FOREIGN)),
    ("a package in front of _ops", "foreign", written("_ops/__init__.py", f"{FOREIGN}ops = None\n")),
    ("a library in front of the package", "loads", foreign_library("__init__.abi3.so")),
    ("a library in front of a package inside", "foreign", foreign_library("shapes/__init__.abi3.so")),
    ("the same name in capitals", "loads", written("SCALING.PY", FOREIGN)),
    ("the same name to who normalizes it", "loads", written("\uff53caling.py", FOREIGN)),
    ("the same name and a space", "loads", written("scaling.py ", FOREIGN)),
    (
        "the package one folder deeper",
        "foreign",
        in_order(removed("__init__.py"), without_listing, written("tiny/__init__.py", FOREIGN)),
    ),
    ("a module more", "loads", written("more.py", FOREIGN)),
    ("a module for every start of Python", "loads", written("sitecustomize.py", FOREIGN)),
    ("a module with a library's name", "loads", written("torch.py", FOREIGN)),
    ("a file of paths", "loads", written("more.pth", "import os\n")),
    ("the package inside itself", "loads", written("tiny/__init__.py", FOREIGN)),
    ("a variant inside the variant", "loads", forged_variant_inside("torch-cpu")),
    ("a build inside the variant", "loads", forged_variant_inside("build/torch-cpu")),
]
LINKS = [
    ("a module linked out of the cache", "foreign", linked_outside("scaling.py")),
    ("a module linked to another's file", "error", linked("scaling.py", "/etc/passwd")),
    ("data linked to another's file", "loads", linked("data.json", "/etc/passwd")),
    ("a module linked to an equal file elsewhere", "loads", linked_outside("scaling.py", str)),
    ("a module linked past the blobs", "foreign", past_the_blobs),
    ("a module linked to nothing", "error", linked("scaling.py", "../../../../blobs/absent")),
    ("a link more", "loads", linked("more", "/etc")),
    ("a blob that is a link", "foreign", linked_blob),
    ("a blob by another name", "loads", blob_by_another_name),
    ("blobs that are elsewhere", "loads", linked_blobs),
    ("a folder that is a link", "foreign", linked_folder(lambda cache: variant_in(cache) / "shapes")),
    ("a variant that is a link", "foreign", linked_folder(variant_in)),
    ("a build that is a link", "foreign", linked_folder(lambda cache: variant_in(cache).parent)),
    ("a snapshot that is a link to another one", "foreign", other_snapshot),
    ("a repository that is a link", "loads", linked_repository),
    ("a blob with another name out of the cache", "foreign", another_hard_link),
    ("a module linked to its blob absolutely", "loads", linked_by("{cache}/blobs/{blob}")),
    ("a module linked through the working directory", "loads", linked_by("/proc/self/cwd/{here}/blobs/{blob}")),
    ("a module linked into the blobs and out and in", "loads", linked_by("../../../../blobs/../blobs/{blob}")),
    ("a module linked to its blob as a folder", "error", linked_by("../../../../blobs/{blob}/")),
    ("a module linked to itself", "error", linked("scaling.py", "scaling.py")),
    ("a snapshot that is a link", "foreign", linked_folder(lambda cache: variant_in(cache).parents[1])),
]
LIBRARIES = [
    ("a library cut short", "killed", edited_blob(LIBRARY_FILE, lambda code: code[: len(code) // 2])),
    ("an empty library", "error", edited_blob(LIBRARY_FILE, lambda code: b"")),
    ("a foreign library", "foreign", foreign_library(LIBRARY_FILE)),
    ("a foreign library and a new digest", "foreign", in_order(foreign_library(LIBRARY_FILE), digested_again)),
    ("a library more", "loads", foreign_library("_tiny_cpu_fffffff.abi3.so")),
    ("a library removed, not noted", "error", in_order(removed(LIBRARY_FILE), without_listing)),
]
VARIANTS = [
    ("a variant that is preferred", "foreign", planted(NAME.replace("abi211", "abi212"))),
    ("a variant for every platform", "loads", planted("torch-universal")),
    ("a variant for another backend", "loads", planted("torch-rocm")),
    ("a variant by a name of old", "loads", planted("torch211-cxx11" + NAME[len("torch-stable-abi211") :])),
    ("another variant in its folder", "loads", in_order(other_variant_inside, without_listing)),
    ("a renamed variant", "loads", in_order(renamed(NAME.replace("abi211", "abi210")), without_listing)),
    (
        "a renamed variant for newer torches",
        "loads",
        in_order(renamed(NAME.replace("211", "299")), without_listing),
    ),
]
METADATA = [
    ("another id", "loads", described(lambda said: {**said, "id": "torch"})),
    ("another name", "loads", described(lambda said: {**said, "name": "huge"})),
    ("another version", "loads", described(lambda said: {**said, "version": 9})),
    ("another backend", "loads", described(lambda said: {**said, "backend": {"type": "cuda"}})),
    ("another commit", "loads", described(lambda said: {**said, "source": "https://example.org/"})),
    ("a Python dependency", "error", described(lambda said: {**said, "python-depends": ["numpy"]})),
    (
        "a kernel dependency",
        "error",
        described(lambda said: {**said, "kernel-depends": [{"repo-id": "org/other", "version": 1}]}),
    ),
    ("a demand of a newer loader", "error", described(lambda said: {**said, "kernels-minver": "99.0"})),
    ("no digest", "loads", described(lambda said: {key: said[key] for key in said if key != "digest"})),
    ("an empty digest", "loads", digested(lambda files: {})),
    (
        "a digest by another algorithm",
        "loads",
        with_digest(algorithm="sha512"),
    ),
    ("an absolute path in the digest", "loads", digested(lambda files: {**files, "/etc/passwd": ""})),
    ("a path out of the variant in the digest", "loads", digested(lambda files: {**files, "../torch-cpu/_ops.py": ""})),
    ("other capitals in the digest", "loads", digested(lambda files: {name.upper(): files[name] for name in files})),
    ("a key twice", "error", raw(lambda text: text.replace(b"{", b'{"id": "torch", ', 1))),
    ("digests twice", "loads", raw(lambda text: text.replace(b'"scaling.py"', b'"scaling.py": "", "scaling.py"'))),
    ("a digest of a path without end", "loads", digested(lambda files: {**files, "a/" * 10**5: ""})),
    ("a number without end", "error", raw(lambda text: text.replace(b'"version": 1', b'"version": ' + b"9" * 10**5))),
    ("no number", "error", raw(lambda text: text.replace(b'"version": 1', b'"version": NaN'))),
    ("an object more", "error", raw(lambda text: text + b"{}")),
    ("no UTF-8", "error", raw(lambda text: text.replace(b"Apache", b"Apache\xff"))),
    ("UTF-16", "error", raw(lambda text: text.decode().encode("utf-16"))),
    ("a byte order mark", "error", raw(lambda text: b"\xef\xbb\xbf" + text)),
    ("more than a MiB", "loads", raw(lambda text: text + b" " * 2**20)),
    ("a list", "error", raw(lambda text: json.dumps([json.loads(text)]).encode())),
    (
        "lists without end",
        "loads",
        raw(lambda text: text.replace(b"{", b'{"more": ' + b"[" * 10**5 + b"]" * 10**5 + b",", 1)),
    ),
    (
        "metadata linked out of the cache",
        "loads",
        linked_outside("metadata.json", str),
    ),
]
NO_FILES = [
    ("a pipe more", "loads", pipe("more")),
    ("a pipe in place of data", "error", pipe("data.json")),
    ("a socket more", "loads", with_a_socket),
    ("a terabyte in place of data", "loads", sparse),
    ("a device in place of data", "error", device("data.json", 3)),
    ("a device in place of code", "error", device("scaling.py", 5)),
    ("a pipe in place of a signature", "loads", pipe("metadata.json.sigstore")),
    ("a folder more", "loads", folder("more")),
    ("a folder in place of data", "error", folder("data.json")),
    ("a name with a line in it", "loads", written("more\nintact", "")),
    ("a name that moves the cursor", "loads", written("more\x1b[2A", "")),
]
TABLE = [*DELETED, *BYTECODE, *CODE, *IN_FRONT, *LINKS, *LIBRARIES, *VARIANTS, *METADATA, *NO_FILES]
CACHES = [(name, tamper) for name, today, tamper in TABLE]
TODAY = {name: today for name, today, tamper in TABLE}
