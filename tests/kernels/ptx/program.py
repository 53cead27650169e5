"""PTX text to a list of instructions."""

import dataclasses
import re

__all__ = ["Instruction", "Program", "parse"]

INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%?[A-Za-z_]\w*)\b")
BITS = {"pred": 1, "b16": 16, "f16": 16, "b32": 32, "f32": 32, "b64": 64, "f64": 64}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: ``@!predicate op.suffix.suffix operands``."""

    text: str
    op: str
    suffixes: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
        parameters: Bytes of each parameter, in order.
        threads: Threads a block.
        instructions: In the order of the text.
        targets: Label to the index of the instruction after it.
        register_bits: Bits of the registers by the prefix of their names.
    """

    name: str
    parameters: tuple[int, ...]
    threads: int
    instructions: tuple[Instruction, ...]
    targets: dict[str, int]
    register_bits: dict[str, int]


def parse(ptx: str) -> Program:
    """The one kernel of ``ptx``, as Triton writes it."""
    text = re.sub(r"//[^\n]*", "", ptx)
    head, body = re.search(r"\.visible \.entry (.*?)\{(.*)\n\}", text, re.S).groups()
    name = re.match(r"\w+", head)[0]
    parameters = tuple(int(bits) // 8 for bits in re.findall(r"\.param \.[bu](\d+)", head))
    threads = int(re.search(r"\.reqntid (\d+)", head)[1])
    register_bits = {prefix: BITS[kind] for kind, prefix in REGISTERS.findall(body)}
    instructions: list[Instruction] = []
    targets: dict[str, int] = {}
    for line in statements(body):
        if line.endswith(":"):
            targets[line[:-1]] = len(instructions)
            continue
        negation, predicate, opcode, operands = INSTRUCTION.match(line).groups()
        op, *suffixes = opcode.split(".")
        instructions.append(
            Instruction(line, op, tuple(suffixes), split(operands), predicate, negation == "!")
        )
    return Program(name, parameters, threads, tuple(instructions), targets, register_bits)


def statements(body: str):
    """Instructions and labels, without directives and without the braces around inline assembly."""
    for line in body.splitlines():
        line = line.strip()
        if re.match(r"[$\w]+:$", line):
            yield line
            continue
        for part in re.split(r";", line):
            part = part.strip().removeprefix("{ ").strip()
            if part not in ("", "{", "}") and not part.startswith("."):
                yield part


def split(operands: str) -> tuple[str, ...]:
    """At the commas that are in no bracket."""
    parts, depth, current = [], 0, ""
    for character in operands:
        depth += character in "{[("
        depth -= character in "}])"
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return tuple([*parts, current.strip()] if current.strip() else parts)
