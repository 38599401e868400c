"""Registers that an instruction writes while an asynchronous product of SM90 still owns them, from SASS text.

A warpgroup product (HGMMA, QGMMA, IGMMA) runs after it was issued; its sums are its own until a WARPGROUP.DEPBAR has
waited for its group. ptxas 13.0 breaks this where two groups add to the same sums and the first is waited for alone
(`wgmma.wait_group 1`): it gives the registers of the sums to others while the second group runs. Results are wrong
then, or the kernel ends with "illegal instruction"; no warning says so. The text is read from top to bottom, so what is
under way at the end of a loop is not followed to its beginning.
"""

import re

LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Za-z0-9_.]+)\s*([^;]*);")
PRODUCT = re.compile(r"^[HQI]GMMA\.64x(\d+)x")
TARGET = re.compile(r"^(?:(?:U?P\d|U?PT),\s*)*R(\d+)\b")
NO_TARGET = ("ST", "RED", "SYNCS", "BAR", "ATOM", "R2UR", "UBLKCP", "CCTL", "MEMBAR", "BRA", "WARPSYNC")
PAIRS = ("IMAD.WIDE", "CS2R", "I2F.F64", "LDC.64", "LDS.64", "LDG.E.64", "LD.E.64")


def width(operation: str) -> int:
    if ".128" in operation:
        return 4
    return 2 if ".64" in operation or operation.startswith(PAIRS) else 1


def owned_writes(lines: list[str]) -> list[str]:
    """Instructions of one function, in the text's order, that write sums of a product under way."""
    groups: list[list[range]] = []
    asked: list[range] = []  # not committed yet
    found = []
    for line in lines:
        match = LINE.match(line)
        if match is None:
            continue
        operation, operands = match.groups()
        if product := PRODUCT.match(operation):
            first = int(operands.split(",")[0].strip()[1:])
            asked.append(range(first, first + int(product[1]) // 2))
            if "gsb0" in operands:
                groups.append(asked)
                asked = []
            continue
        if operation.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.split(",")[1].strip(), 16)
            groups = groups[-left:] if left else []
            continue
        target = TARGET.match(operands)
        if target is None or operation.startswith(NO_TARGET):
            continue
        written = range(int(target[1]), int(target[1]) + width(operation))
        if any(max(written[0], sums[0]) <= min(written[-1], sums[-1]) for group in (*groups, asked) for sums in group):
            found.append(" ".join(f"{operation} {operands}".split()))
    return found
