"""A short hash of a lowered program, by which its counts are known again."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

# What lowering writes for arguments placed on one device: shardings over an empty mesh.
_ON_ONE_DEVICE = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\n *sdy\.mesh @empty_mesh = [^\n]*", ""),
        (r"sdy\.sharding = #sdy\.sharding<@empty_mesh, \[[^\]]*\]>(, )?", ""),
        (r", \}", "}"),
        (r" \{\}", ""),
    )
)


def fingerprint(lowered: Any) -> str:
    """A short hash of the program before the compiler sees it.

    Source lines are not part of the text, so moving code does not change it. Nor is
    the placement on a single device, so that a program lowered for a platform without
    a device of it has the same hash.
    """
    text = _KERNEL.sub(_without_lines, lowered.as_text())
    text = _OF_TPU.sub(_of_no_version, text)
    for pattern, replacement in _ON_ONE_DEVICE:
        text = pattern.sub(replacement, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# A kernel of Pallas for Triton: a module as bytes, with source lines and paths in it.
_KERNEL = re.compile(r'\bir = "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb"\\([0-9A-F]{2}|.)", re.DOTALL)


def _without_lines(found: re.Match[str]) -> str:
    """The kernel as text, which has none."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    def byte(escaped: re.Match[bytes]) -> bytes:
        code = escaped.group(1)
        return bytes.fromhex(code.decode()) if len(code) == 2 else code

    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    with context:
        return str(ir.Module.parse(_ESCAPED.sub(byte, found.group(1).encode())))


# The same for a TPU, whose module also depends on who compiles it.
_OF_TPU = re.compile(r"\\22body\\22: \\22([\w+/=]+)")


def _of_no_version(found: re.Match[str]) -> str:
    """The kernel as text, whatever version of Mosaic it is written for."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mosaic.python import tpu

    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    read = "builtin.module(mosaic-serde{serialize=false})"
    with context:
        module = ir.Module.parse(base64.b64decode(found[1]))
        passmanager.PassManager.parse(read).run(module.operation)
        return re.sub(r"stable_mosaic.version = \d+", "", str(module))
