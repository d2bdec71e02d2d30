"""Strip: what only XLA's compiler needs is taken out of a serialised executable.

XLA:CPU keeps the program that an executable was made from, 4 KB for each instruction, as long as the executable lives.
Most of it are the bodies of fused loops, and nothing looks into them where machine code, buffers and the order of the
calls are there. So each loop becomes a call of which nothing is known. No option of XLA's does that.

The bytes are protocol buffers (xla/service/hlo.proto, xla/xla_data.proto); whatever is not named here stays as it is.
"""

from __future__ import annotations

import functools
from typing import Any

# Of each message the fields that are read or written: name, number, type; a * marks what repeats. `Serialized` is
# PjRt's ExecutableAndOptionsProto, `Result` XLA:CPU's CompilationResultProto.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "Serialized": (("result", 1, "Result"),),
    "Result": (("module", 1, "ModuleWithConfig"),),
    "ModuleWithConfig": (("hlo", 1, "Module"),),
    "Module": (("computations", 3, "*Computation"),),
    "Computation": (("instructions", 2, "*Instruction"), ("id", 5, "int64"), ("root", 6, "int64")),
    "Instruction": (
        ("name", 1, "bytes"),
        ("opcode", 2, "bytes"),
        ("shape", 3, "Shape"),
        ("fusion_kind", 11, "bytes"),
        ("target", 28, "bytes"),
        ("id", 35, "int64"),
        ("operands", 36, "*int64"),
        ("calls", 38, "*int64"),
    ),
    "Shape": (("element", 2, "int64"), ("dimensions", 3, "*int64"), ("layout", 5, "Layout")),
    "Layout": (("minor_to_major", 1, "*int64"),),
}
_F32 = 11  # PrimitiveType in xla_data.proto
_COMPILED = (b"kLoop", b"kInput", b"kOutput")  # kCustom: a library makes something of the body whenever it is loaded
OPAQUE = b"fused_eager_stripped"  # the target of calls that nothing makes


@functools.cache
def _classes() -> dict[str, Any]:
    # Importing protobuf takes a tenth of a second, which is little where something has just been compiled.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    types = {"bytes": field.TYPE_BYTES, "int64": field.TYPE_INT64}
    file = descriptor_pb2.FileDescriptorProto(name="fused_eager/strip.proto", package="fused_eager", syntax="proto3")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, type in fields:
            plain = type.lstrip("*")
            row = described.field.add(name=name, number=number, type=types.get(plain, field.TYPE_MESSAGE))
            row.label = field.LABEL_OPTIONAL if plain == type else field.LABEL_REPEATED
            if plain not in types:
                row.type_name = f".fused_eager.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {m: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"fused_eager.{m}")) for m in _MESSAGES}


def strip(code: bytes, flops: float) -> bytes | None:
    """A serialised executable without the bodies of its loops; None where it has none, or is not what is known here.

    Args:
        code: what XLA:CPU made of an executable.
        flops: operations that XLA counts in it. By their number it decides whether it runs a program in the calling
            thread or in one of its own, so that they stay as many or are more.
    """
    for start in (_after_header(code), 0):
        serialized = _parsed(code[start:])
        if serialized is not None and _strip(serialized.result.module.hlo, int(flops)):
            return code[:start] + serialized.SerializeToString()
    return None


def _parsed(code: bytes) -> Any:
    from google.protobuf.message import DecodeError

    serialized = _classes()["Serialized"]()
    try:
        serialized.ParseFromString(code)
    except DecodeError:
        return None
    return serialized


def _after_header(code: bytes) -> int:
    """Where the executable begins: behind a message of IFRT's and its length, a varint, in jaxlib 0.10 (not in 0.6)."""
    length = 0
    for i, byte in enumerate(code[:5]):
        length |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return i + 1 + length
    return 0


def _strip(module: Any, flops: int) -> bool:
    """Make opaque calls of a module's fused loops. Returns whether that could be done."""
    bodies = {c.id: c for c in module.computations}
    loops = [i for c in bodies.values() for i in c.instructions if i.fusion_kind in _COMPILED and len(i.calls) == 1]
    if flops > 0:  # one body stays, and counts for all
        counting = next((loop for loop in loops if _count(bodies[loop.calls[0]], flops + len(loops))), None)
        if counting is None:
            return False
        loops = [loop for loop in loops if loop.calls != counting.calls]
    lost = {loop.calls[0] for loop in loops}
    for loop in loops:
        loop.opcode, loop.target = b"custom-call", OPAQUE
        loop.ClearField("fusion_kind")
        loop.ClearField("calls")
    lost -= {id for c in bodies.values() for i in c.instructions for id in i.calls}
    for place in reversed(range(len(module.computations))):
        if module.computations[place].id in lost:
            del module.computations[place]
    return bool(lost) or flops > 0


def _count(body: Any, flops: int) -> bool:
    """Leave of a body its parameters, a result of which nothing is known, and `flops` operations that nothing uses.

    Returns whether there was an instruction to spare for each of those.
    """
    parameters = [i for i in body.instructions if i.opcode == b"parameter"]
    others = [i for i in body.instructions if i.opcode != b"parameter"]
    root = next((i for i in others if i.id == body.root), None)
    if root is None or len(others) < 3:
        return False
    first, second = [i for i in others if i.id != body.root][:2]
    instruction, shape, layout = (_classes()[m] for m in ("Instruction", "Shape", "Layout"))
    vector = shape(element=_F32, dimensions=[flops], layout=layout(minor_to_major=[0]))
    opaque = functools.partial(instruction, opcode=b"custom-call", target=OPAQUE)
    result = opaque(name=root.name, shape=root.shape, id=root.id)
    source = opaque(name=first.name, shape=vector, id=first.id)
    counted = instruction(name=second.name, opcode=b"negate", shape=vector, operands=[first.id], id=second.id)
    del body.instructions[:]
    body.instructions.extend([*parameters, result, source, counted])
    return True
