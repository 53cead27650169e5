"""The control flow of one thread block, all threads of a step at once.

Threads that part at a branch go on in turn, those at the earliest instruction first, and join where they meet.
"""

import numpy as np

from tests.kernels.ptx.instructions import Instructions
from tests.kernels.ptx.memory import PTXError
from tests.kernels.ptx.program import Instruction

__all__ = ["Block"]


class Block(Instructions):
    """A thread block of a kernel."""

    def run(self) -> None:
        """Until every thread has returned."""
        instructions, targets = self.program.instructions, self.program.targets
        everyone = np.ones(self.program.threads, bool)
        waiting: dict[int, np.ndarray] = {0: everyone}
        live = everyone.copy()
        with np.errstate(all="ignore"):
            while waiting:
                pc = min(waiting)
                active = waiting.pop(pc)
                while True:
                    if pc in waiting:
                        active = active | waiting.pop(pc)
                    instruction = instructions[pc]
                    taken = self.taken(instruction, active)
                    pc += 1
                    if instruction.op in ("bra", "ret", "exit"):
                        if taken.any():
                            if instruction.op == "bra":
                                target = targets[instruction.operands[-1]]
                                waiting[target] = waiting.get(target, False) | taken
                            else:
                                live &= ~taken
                            active = active & ~taken
                        if active.any():
                            waiting[pc] = waiting.get(pc, False) | active
                        break
                    if instruction.op in ("bar", "barrier") and "warp" not in instruction.suffixes:
                        if (taken != live).any():
                            raise PTXError(f"{instruction.text}: a barrier that some threads do not reach")
                        self.shared.barrier()
                    elif taken.any():
                        try:
                            self.execute(instruction, taken)
                        except PTXError as error:
                            raise PTXError(f"{self.program.name}: {instruction.text}: {error}") from None
                    if waiting and min(waiting) < pc:
                        waiting[pc] = waiting.get(pc, False) | active
                        break

    def taken(self, instruction: Instruction, active):
        """Which of the active threads run the instruction."""
        if instruction.predicate is None:
            return active
        predicate = self.registers[instruction.predicate]
        return active & (~predicate if instruction.negated else predicate)
