"""Reading a cubin's ELF sections: instructions, registers, shared memory and spills."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel, as the assembler wrote them into the cubin.

    Attributes
    ----------
    registers
        Registers per thread.
    shared_bytes
        Static shared memory per thread block, without the 1 KiB that the system reserves on sm_90 and later.
    local_bytes
        Stack frame per thread, for spills and dynamically indexed arrays. Zero means that there are none, 2**32 - 1
        that it depends on a recursion's depth.
    spill_instructions
        Loads and stores of spilled registers in the machine code, each counted once, however often it is executed.
        Undocumented in the format (attribute 0x55); in output of NVRTC 13.0 and 13.5 equal to the number of such
        machine instructions.
    max_threads
        The block size declared by ``__launch_bounds__``, or None.
    """

    registers: int
    shared_bytes: int
    local_bytes: int
    spill_instructions: int
    max_threads: int | None


_EM_CUDA = 190
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_MIN_STACK, _MAX_THREADS, _FRAME_SIZE, _REGISTERS, _SPILLS = 0x12, 0x05, 0x11, 0x2F, 0x55


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: memoryview
    size: int
    link: int


def _header(elf: memoryview) -> tuple[int, int, int, int]:
    """Machine, and offset, entry size and number of the section headers."""
    (machine,) = struct.unpack_from("<H", elf, 0x12)
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    entry, number = struct.unpack_from("<HH", elf, 0x3A)
    return machine, offset, entry, number


def _length(elf: memoryview) -> int:
    """Size of an ELF file, computed from its own tables."""
    _, offset, entry, number = _header(elf)
    end: int = offset + entry * number
    (programs,) = struct.unpack_from("<Q", elf, 0x20)
    size, count = struct.unpack_from("<HH", elf, 0x36)
    end = max(end, programs + size * count)
    for i in range(number):
        _, kind, _, _, at, length = struct.unpack_from("<IIQQQQ", elf, offset + i * entry)
        if kind != 8:  # SHT_NOBITS occupies no space in the file
            end = max(end, at + length)
    return end


def cubins(library: Path) -> list[bytes]:
    """Find the CUDA machine code in a library that TVM exported.

    Parameters
    ----------
    library
        The shared library.

    Returns
    -------
    list of bytes
        Each cubin, an ELF file of its own. Empty if the library has none, because it has no device code or contains
        CUDA source.
    """
    data = Path(library).read_bytes()
    found: list[bytes] = []
    at = data.find(_ELF64_LITTLE, 1)  # at 0 there is the library itself
    while at >= 0:
        elf = memoryview(data)[at:]
        step = 1
        try:
            if _header(elf)[0] == _EM_CUDA and (length := _length(elf)) <= len(elf):
                found.append(bytes(elf[:length]))
                step = length
        except struct.error:  # these bytes only resembled a header
            pass
        at = data.find(_ELF64_LITTLE, at + step)
    return found


def ptx_texts(library: Path) -> list[str]:
    """Find the PTX in a library that TVM exported for an architecture such as ``compute_90``."""
    data = Path(library).read_bytes()
    found = re.findall(rb"\.version \d+\.\d+\s+\.target [^\0]*", data)
    return [text.decode() for text in found]


def cubin_arch(cubin: bytes) -> int:
    """Return the compute capability a cubin is for: 90 for both sm_90 and sm_90a."""
    flags = int.from_bytes(cubin[0x30:0x34], "little")
    # The number moved by a byte in version 8 of the ABI (CUDA 13).
    return (flags >> 8 if cubin[8] >= 8 else flags) & 0xFF


def _sections(cubin: bytes) -> list[_Section]:
    elf = memoryview(cubin)
    machine, offset, entry, number = _header(elf)
    if not cubin.startswith(_ELF64_LITTLE) or machine != _EM_CUDA:
        raise ValueError("not a cubin")
    rows = [struct.unpack_from("<IIQQQQI", elf, offset + i * entry) for i in range(number)]
    (names,) = struct.unpack_from("<H", elf, 0x3E)
    strings = cubin[rows[names][4] : rows[names][4] + rows[names][5]]
    return [
        _Section(_text(strings, name), kind, elf[at : at + (0 if kind == 8 else size)], size, link)
        for name, kind, _, _, at, size, link in rows
    ]


def code_sections(cubin: bytes) -> dict[str, bytes]:
    """Sections of a cubin that determine what its kernels execute, by name: instructions, constants, and the size of
    shared memory.

    Two cubins with equal sections compute the same in the same way, whatever the names of their symbols.
    """
    found = {}
    for section in _sections(cubin):
        if section.name.startswith((".text.", ".nv.constant", ".nv.global.init")):
            found[section.name] = bytes(section.data)
        elif section.name.startswith(".nv.shared."):
            found[section.name] = str(section.size).encode()
    return found


def _text(strings: bytes | memoryview, at: int) -> str:
    raw = bytes(strings)
    return raw[at : raw.index(b"\0", at)].decode()


def _attributes(info: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Attributes of a ``.nv.info`` section that have a payload; others are not needed."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:  # EIFMT_SVAL: the value is the payload's size
            yield attribute, info[at : at + value]
            at += value


def resource_usage(cubin: bytes) -> dict[str, KernelResources]:
    """Read the resources of a cubin's kernels, without a CUDA toolkit.

    Parameters
    ----------
    cubin
        One of `cubins`.

    Returns
    -------
    dict
        By kernel name.
    """
    sections = {section.name: section for section in _sections(cubin)}
    symbols = sections[".symtab"]
    strings = _sections(cubin)[symbols.link].data
    per_function: dict[int, dict[str, int]] = {_REGISTERS: {}, _FRAME_SIZE: {}, _MIN_STACK: {}}
    for attribute, data in _attributes(sections[".nv.info"].data):
        if attribute in per_function:
            symbol, value = struct.unpack("<II", data)
            (name,) = struct.unpack_from("<I", symbols.data, symbol * 24)
            per_function[attribute][_text(strings, name)] = value
    # From sm_90 on, a kernel's shared memory begins with 1 KiB reserved by the system.
    reserved = 1024 if ".nv.shared.reserved.0" in sections else 0
    usage = {}
    prefix = ".nv.info."
    for name in (key.removeprefix(prefix) for key in sections if key.startswith(prefix)):
        if f".text.{name}" not in sections:
            continue
        attributes = list(_attributes(sections[prefix + name].data))
        own = dict(attributes)
        threads = struct.unpack("<III", own[_MAX_THREADS]) if _MAX_THREADS in own else None
        shared = sections.get(f".nv.shared.{name}")
        # Pairs (kind, offset), where kind 1 is a spill; long lists are split over several attributes.
        notes = b"".join(data for attribute, data in attributes if attribute == _SPILLS)
        usage[name] = KernelResources(
            registers=per_function[_REGISTERS][name],
            shared_bytes=max(shared.size - reserved, 0) if shared else 0,
            # The stack of called functions counts too, hence the larger of the two.
            local_bytes=max(per_function[a].get(name, 0) for a in (_FRAME_SIZE, _MIN_STACK)),
            spill_instructions=sum(kind == 1 for kind, _ in struct.iter_unpack("<II", notes)),
            max_threads=threads[0] * threads[1] * threads[2] if threads else None,
        )
    return usage
