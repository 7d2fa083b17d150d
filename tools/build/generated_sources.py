"""The files that the Hub's builder generates for a kernel, made here in the same form."""

from __future__ import annotations

# These macros expand their arguments first, so an argument may be the macro TORCH_EXTENSION_NAME.
REGISTRATION_H = """\
#pragma once

#include <Python.h>

#define OPTIMIZER_CONCAT_(A, B) A##B
#define OPTIMIZER_CONCAT(A, B) OPTIMIZER_CONCAT_(A, B)
#define OPTIMIZER_STRINGIFY_(A) #A
#define OPTIMIZER_STRINGIFY(A) OPTIMIZER_STRINGIFY_(A)

#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, KEY, MODULE) STABLE_TORCH_LIBRARY_IMPL(NAME, KEY, MODULE)

// Importing the library is what registers its operators; the module itself is empty.
#define REGISTER_EXTENSION(NAME)                                                    \\
  PyMODINIT_FUNC OPTIMIZER_CONCAT(PyInit_, NAME)() {                                \\
    static PyModuleDef module = {                                                   \\
        PyModuleDef_HEAD_INIT, OPTIMIZER_STRINGIFY(NAME), nullptr, 0, nullptr,      \\
        nullptr, nullptr, nullptr, nullptr};                                        \\
    return PyModule_Create(&module);                                                \\
  }
"""

# What headers use of a newer glibc than 2.28. With copies of our own the library still loads there.
# - Recent libstdc++ headers read a variable of glibc 2.32. Zero is the safe value: there may be several threads.
# - Headers of torch 2.15 look up newer functions of torch with dlsym, which has another version since 2.34.
GLIBC_SHIM_CPP = """\
#if defined(__aarch64__)
#define OPTIMIZER_OLDEST_GLIBC "GLIBC_2.17"
#else
#define OPTIMIZER_OLDEST_GLIBC "GLIBC_2.2.5"
#endif

extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

__asm__(".symver oldest_dlsym, dlsym@" OPTIMIZER_OLDEST_GLIBC);
void* oldest_dlsym(void* handle, const char* name);
__attribute__((visibility("hidden"))) void* dlsym(void* handle, const char* name) { return oldest_dlsym(handle, name); }
}
"""


def ops_py(ops: str, has_library: bool) -> str:
    """Return `_ops.py`, through which the package reaches the operators in the namespace `ops`.

    It loads the library of that name if there is one. Without one the namespace is empty until the package fills it.
    """
    loading = f"from . import {ops}\n" if has_library else ""
    return f'''\
import torch
{loading}ops = torch.ops.{ops}


def add_op_namespace_prefix(op_name: str) -> str:
    """Prefix an operator's name with the namespace of this build."""
    return f"{ops}::{{op_name}}"
'''
