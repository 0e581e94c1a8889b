"""Looks for local memory (spilled registers) inside the loops of a disassembled kernel."""

import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:(@\S+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L\w*):")
_TARGET = re.compile(r"`\((\.L\w*)\)")
_LOCAL = ("LDL", "STL")
_JUMPS = ("BRA", "JMP", "CALL", "BRX", "JMX")
_ENDS = ("EXIT", "RET", "BRX", "JMX")


@dataclass(frozen=True)
class _Instruction:
    predicate: str
    opcode: str
    text: str

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def conditional(self) -> bool:
        # a branch may also carry its condition as an operand, or diverge
        operands = self.text.partition("`")[0]
        return bool(self.predicate) or "DIV" in self.opcode or bool(re.search(r"U?P\d", operands))


def _parse(sass: str) -> tuple[list[_Instruction], dict[str, int]]:
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            instructions.append(_Instruction(found[1] or "", found[2], found[3]))
    return instructions, labels


def _successors(instructions: list[_Instruction], labels: dict[str, int]) -> list[list[int]]:
    graph: list[list[int]] = []
    for i, instruction in enumerate(instructions):
        following = []
        if instruction.base in _JUMPS and (target := _TARGET.search(instruction.text)):
            following.append(labels[target[1]])
        leaves = instruction.base in _ENDS or instruction.base in ("BRA", "JMP")
        if (not leaves or instruction.conditional) and i + 1 < len(instructions):
            following.append(i + 1)
        graph.append([j for j in following if j < len(instructions)])
    return graph


def _in_cycle(graph: list[list[int]]) -> set[int]:
    """Nodes of the strongly connected components that have an edge inside (Tarjan's algorithm, without recursion)."""
    index = [-1] * len(graph)
    low = [0] * len(graph)
    on_stack = [False] * len(graph)
    stack: list[int] = []
    cyclic: set[int] = set()
    counter = 0
    for root in range(len(graph)):
        if index[root] >= 0:
            continue
        work = [(root, iter(graph[root]))]
        while work:
            node, edges = work[-1]
            if index[node] < 0:
                index[node] = low[node] = counter
                counter += 1
                stack.append(node)
                on_stack[node] = True
            deeper = None
            for successor in edges:
                if index[successor] < 0:
                    deeper = successor
                    break
                if on_stack[successor]:
                    low[node] = min(low[node], index[successor])
            if deeper is not None:
                work.append((deeper, iter(graph[deeper])))
                continue
            work.pop()
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[node])
            if low[node] == index[node]:
                component = []
                while True:
                    member = stack.pop()
                    on_stack[member] = False
                    component.append(member)
                    if member == node:
                        break
                if len(component) > 1 or node in graph[node]:
                    cyclic.update(component)
    return cyclic


def local_memory_in_loops(sass: str) -> list[str]:
    """Instructions that touch local memory and can run more than once, from the text of `nvdisasm -c`."""
    instructions, labels = _parse(sass)
    if not instructions:
        raise ValueError("local_memory_in_loops: sass must hold instructions, got none")
    cyclic = _in_cycle(_successors(instructions, labels))
    return [
        f"{instruction.opcode} {instruction.text}"
        for i, instruction in enumerate(instructions)
        if i in cyclic and instruction.base in _LOCAL
    ]
