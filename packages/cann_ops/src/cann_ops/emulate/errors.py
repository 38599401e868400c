"""What the emulator finds. The first word of its message says which."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """Generated source did something that the device does not allow, or that has no sure result there."""


class CompileError(EmulationError):
    """The source does not compile against the emulator; calls that it does not have are named."""


class RaceError(EmulationError):
    """Two accesses of the same bytes that no flag, barrier or program order puts in order."""


class BoundsError(EmulationError):
    """An access outside of its tensor or of the on-chip memory."""


class UndefinedError(EmulationError):
    """Bytes that nothing has written decide over a branch, an address or a mask."""


class FlagError(EmulationError):
    """Flags, locks or thread barriers that do not pair: the device would hang or go on too early."""


class AlignmentError(EmulationError):
    """An address that the instruction does not take."""


class InstructionError(EmulationError):
    """An operand that the instruction does not take, or a form of it that is not emulated."""


class DeviceAssertError(EmulationError):
    """An assert of the device code does not hold."""


KINDS: dict[str, type[EmulationError]] = {
    "race": RaceError,
    "bounds": BoundsError,
    "undefined": UndefinedError,
    "flag": FlagError,
    "deadlock": FlagError,
    "alignment": AlignmentError,
    "value": InstructionError,
    "unsupported": InstructionError,
    "assert": DeviceAssertError,
}


def from_message(message: str) -> EmulationError:
    """The error for a message "kind: text" of the runtime."""
    kind, _, text = message.partition(": ")
    return KINDS.get(kind, EmulationError)(text if kind in KINDS else message)
