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
    text = _OF_TPU.sub(_without_version, text)
    for pattern, replacement in _ON_ONE_DEVICE:
        text = pattern.sub(replacement, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Kernels of Pallas, for Triton and for a TPU: modules as bytes, with source lines and
# paths in them; a TPU's depends on the version of who compiles it, too.
_KERNEL = re.compile(r'\bir = "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb"\\([0-9A-F]{2}|.)", re.DOTALL)
_OF_TPU = re.compile(r"\\22body\\22: \\22([\w+/=]+)")
_READ = "builtin.module(mosaic-serde{serialize=false})"


def _without_lines(found: re.Match[str]) -> str:
    """The kernel as text, which has none."""
    from jaxlib.triton import dialect

    def byte(escaped: re.Match[bytes]) -> bytes:
        code = escaped.group(1)
        return bytes.fromhex(code.decode()) if len(code) == 2 else code

    return _text(_ESCAPED.sub(byte, found.group(1).encode()), dialect)


def _without_version(found: re.Match[str]) -> str:
    """The same of a TPU."""
    from jaxlib.mosaic.python import tpu

    text = _text(base64.b64decode(found[1]), tpu, _READ)
    return re.sub(r"stable_mosaic.version = \d+", "", text)


def _text(module: bytes, dialect: Any, passes: str = "builtin.module()") -> str:
    from jax.interpreters import mlir
    from jaxlib.mlir import ir, passmanager

    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context:
        parsed = ir.Module.parse(module)
        passmanager.PassManager.parse(passes).run(parsed.operation)
        return str(parsed)
