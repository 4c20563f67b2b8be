"""Translation of CUDA C++ for g++ and `cuda_on_cpu.h`: includes, shared memory, and inline PTX as calls."""

from __future__ import annotations

import re

KNOWN_INCLUDES = {"cstdint", "type_traits", "cuda.h", "cuda_fp16.h", "cuda_bf16.h",
                  "math_constants.h", "sm_61_intrinsics.h", "cuda/std/cstdint",
                  "cuda/std/type_traits", "cuda/barrier", "cooperative_groups.h"}  # fmt: skip


def translate(source: str) -> str:
    """Translate CUDA source, keeping line numbers: errors point into the text that `cuda_source` returns."""
    for include in re.findall(r"#\s*include\s*<([^>]+)>", source):
        if include not in KNOWN_INCLUDES:
            raise NotImplementedError(f"#include <{include}>: not emulated")
    source = re.sub(r"#\s*include\s*<(?!cstdint>|type_traits>)[^>]+>", "", source)
    source = re.sub(
        r"extern\s+__shared__\s+(?:__align__\(\d+\)|alignas\(\d+\))?\s*([\w ]+?)\s+(\w+)\[\];",
        r"\1* \2 = (\1*)cuda_on_cpu::dynamic_shared();",
        source,
    )
    source = re.sub(r"__shared__\s+((?:alignas|__align__)\(\d+\))", r"\1 __shared__", source)
    return _translate_asm(source)


def _translate_asm(source: str) -> str:
    out, position = [], 0
    for match in re.finditer(r"\b(?:asm|__asm__)\b\s*(?:volatile|__volatile__)?\s*\(", source):
        if source.count('"', source.rfind("\n", 0, match.start()), match.start()) % 2:
            continue  # inside a string literal
        if match.start() < position:
            continue
        end = _closing(source, match.end())
        body = source[match.end() : end]
        try:
            code = _asm_to_cpp(body)
        except NotImplementedError as error:
            names = re.findall(r"(\w+)\s*\([^()]*\)\s*\{+", source[: match.start()])
            raise NotImplementedError(f"{names[-1] if names else '?'}: {error}") from None
        semicolon = source.index(";", end)
        out.append(source[position : match.start()])
        out.append(code + "\n" * source.count("\n", match.start(), semicolon))
        position = semicolon + 1
    return "".join([*out, source[position:]])


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one before `start`."""
    depth, quoted, i = 1, False, start
    while depth:
        c = text[i]
        if quoted:
            i += c == "\\"
            quoted = c != '"'
        else:
            quoted = c == '"'
            depth += {"(": 1, ")": -1}.get(c, 0)
        i += 1
    return i - 1


def _split(text: str, separator: str) -> list[str]:
    """Split a text at a separator outside of brackets and strings."""
    parts, depth, quoted, last = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"' and (i == 0 or text[i - 1] != "\\"):
            quoted = not quoted
        if not quoted:
            depth += (c in "([{") - (c in ")]}")
            double = "::" in (text[i - 1 : i + 1], text[i : i + 2])
            if c == separator and depth == 0 and not (separator == ":" and double and i):
                parts.append(text[last:i])
                last = i + 1
    return [*parts, text[last:]]


def _asm_to_cpp(body: str) -> str:
    # "a" :: "b" has an empty section of outputs: separate the colons first.
    sections = _split(re.sub(r'(?<=["\s)])::(?=\s*")', ": :", body), ":")
    text = "".join(s.encode().decode("unicode_escape") for s in re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0]))
    operands = [
        _matched(r'\s*"[^"]*"\s*\((.*)\)\s*', o).group(1)
        for section in sections[1:3] for o in _split(section, ",") if o.strip()
    ]  # fmt: skip
    text = re.sub(r"%%", "%", text)
    text = re.sub(r"%(\d+)", lambda m: f"@{m.group(1)}@", text)
    statements = [s.strip() for s in text.replace("{\n", "{ ").split(";")]
    code = []
    for statement in statements:
        statement = re.sub(r"^\{\s*(?=[.@\w])|^\}\s*", "", statement).strip()
        if statement in ("", "}", "{"):
            continue
        code.append(_statement_to_cpp(statement))
    joined = " ".join(code)
    joined = re.sub(r"@(\d+)@", lambda m: f"({operands[int(m.group(1))]})", joined)
    return "{ " + joined.replace("%", "") + " }"


REGISTERS = {"pred": "bool", "b8": "uint8_t", "u64": "uint64_t", "b64": "uint64_t",
             "u32": "uint32_t", "b32": "uint32_t", "f32": "float"}  # fmt: skip
TYPES = {
    **{f"u{n}": f"uint{n}_t" for n in (8, 16, 32, 64)},
    **{f"b{n}": f"uint{n}_t" for n in (8, 16, 32, 64)},
    **{f"s{n}": f"int{n}_t" for n in (8, 16, 32, 64)},
    "f32": "float", "f64": "double",
}  # fmt: skip
SPECIAL = {
    "laneid": "cuda_on_cpu::self().lane", "warpid": "cuda_on_cpu::self().warp",
    "tid": "threadIdx", "ctaid": "blockIdx", "ntid": "blockDim", "nctaid": "gridDim",
    "clusterid": "cuda_on_cpu::cluster_index()", "cluster_nctaid": "cuda_on_cpu::machine.cluster",
    "cluster_ctarank": "cuda_on_cpu::self().block->rank",
    "cluster_nctarank": "cuda_on_cpu::cluster_size()", "nsmid": "2u",
    "lanemask_lt": "((1u << cuda_on_cpu::self().lane) - 1)",
    "lanemask_le": "((2u << cuda_on_cpu::self().lane) - 1)",
    "lanemask_eq": "(1u << cuda_on_cpu::self().lane)",
    "lanemask_gt": "~((2u << cuda_on_cpu::self().lane) - 1)",
    "lanemask_ge": "~((1u << cuda_on_cpu::self().lane) - 1)",
}  # fmt: skip
STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}
ATOMICS = {"add": "Add", "min": "Min", "max": "Max", "and": "And", "or": "Or", "xor": "Xor",
           "exch": "Exch", "inc": "Inc", "dec": "Dec"}  # fmt: skip
# d = f(a, b, ...), keyed by the opcode without its rounding and flush modifiers.
ARITHMETIC = {
    "mov": "{0}", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "mul.lo": "{0} * {1}",
    "fma": "fmaf({0}, {1}, {2})", "mad.lo": "{0} * {1} + {2}", "min": "min({0}, {1})",
    "max": "max({0}, {1})", "max.NaN": "cuda_on_cpu::ptx::max_nan({0}, {1})",
    "abs": "({0} < 0 ? -{0} : {0})", "neg": "-{0}", "and": "{0} & {1}",
    "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}", "ex2": "exp2f({0})", "lg2": "log2f({0})",
    "rcp": "1 / {0}", "rsqrt": "1 / sqrtf({0})", "sqrt": "sqrtf({0})", "tanh": "tanhf({0})",
    "sin": "sinf({0})", "cos": "cosf({0})", "div": "{0} / {1}",
}  # fmt: skip
BITS = {
    "popc.b32": "__popc({0})", "popc.b64": "__popcll({0})", "clz.b32": "__clz({0})",
    "clz.b64": "__clzll({0})", "brev.b32": "__brev({0})", "brev.b64": "__brevll({0})",
    "bfind.u32": "31 - __clz({0})", "bfind.u64": "63 - __clzll({0})",
    "prmt.b32": "__byte_perm({0}, {1}, {2})",
    "bfe.u32": "uint32_t(((uint64_t({0}) >> ({1} & 255)) & ((1ull << min({2} & 255, 32u)) - 1)))",
    "cvta.to.shared.u64": "uint64_t(cuda_on_cpu::shared_address((const void*){0}))",
    "cvta.to.global.u64": "(uint64_t){0}", "cvt.u32.u64": "uint32_t({0})",
    "dp4a.u32.s32": "cuda_on_cpu::ptx::dp4a<uint8_t, int8_t>({0}, {1}, {2})",
    "dp4a.s32.u32": "cuda_on_cpu::ptx::dp4a<int8_t, uint8_t>({0}, {1}, {2})",
    "cvt.rn.f16x2.e4m3x2": "cuda_on_cpu::ptx::halves_of_e4m3({0})",
    "cvt.u8.u16": "uint8_t({0})", "cvt.u16.u8": "uint16_t({0})",
    "activemask.b32": "__activemask()", "createpolicy.fractional.L2::evict_first.b64": "0ull",
    "createpolicy.fractional.L2::evict_last.b64": "0ull",
}  # fmt: skip
# The emulator's ordering is stronger than any of these requires.
NO_EFFECT = re.compile(
    r"(fence|membar)(\.(acq_rel|sc|cta|cluster|gpu|sys|gl|acquire|release))*"
    r"|fence\.mbarrier_init\.release\.cluster|fence\.proxy\.async\.shared::cta"
    r"|wgmma\.(fence|commit_group|wait_group)\.sync\.aligned"
)
MBARRIER = re.compile(
    r"mbarrier\.(init|arrive\.expect_tx|try_wait\.parity)(\.(acquire|release|relaxed)\.(cta|cluster))?"
    r"\.shared(::cta|::cluster)?\.b64"
)


def _statement_to_cpp(statement: str) -> str:
    """One PTX statement as C++; registers are variables, operands @N@ are filled in later."""
    if guard := re.match(r"@(!?)(%?\w+)\s+(.*)", statement, re.S):
        return f"if ({guard.group(1)}{guard.group(2)}) {{ {_statement_to_cpp(guard.group(3))} }}"
    if register := re.fullmatch(r"\.reg\s+\.(\w+)\s+(%?\w+)", statement):
        kind = register.group(1)
        if kind not in REGISTERS:
            raise NotImplementedError(f"PTX register class .{kind} is not emulated")
        return f"{REGISTERS[kind]} {register.group(2)} = {{}};"
    opcode, _, rest = statement.partition(" ")
    operands = [o.strip() for o in _split(rest, ",") if o.strip()]
    parts = opcode.split(".")
    code = _instruction(opcode, parts, operands)
    if code is None:
        raise NotImplementedError(f"PTX instruction {opcode} is not emulated")
    return code


def _matched(pattern: str, text: str) -> re.Match[str]:
    """The match of a whole text; raises NotImplementedError if it has another form."""
    match = re.fullmatch(pattern, text, re.S)
    if match is None:
        raise NotImplementedError(f"operand {text!r} of inline assembly is not emulated")
    return match


def _address(operand: str) -> str:
    inner = _matched(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
    return f"{inner.group(1)}, {inner.group(2) or 0}"


def _lanes(operand: str) -> list[str]:
    return [o.strip() for o in operand.strip("{} ").split(",")]


def _set(destination: str, value: str) -> str:
    return "" if destination == "_" else f"cuda_on_cpu::ptx::set({destination}, {value});"


def _mbarrier(action: str, of_peer: bool, ops: list[str]) -> str | None:
    where = "in_cluster" if of_peer else "in_block"
    place = f"cuda_on_cpu::ptx::{where}({_address(next(o for o in ops if o.startswith('[')))})"
    if of_peer and action != "arrive.expect_tx":
        return None
    if action == "init":
        return f"cuda_on_cpu::mbarrier_init({place}, {ops[1]});"
    if action == "arrive.expect_tx":
        return f"cuda_on_cpu::mbarrier_arrive({place}, {ops[2]}, {str(of_peer).lower()});" if ops[0] == "_" else None
    return f"{ops[0]} = cuda_on_cpu::mbarrier_wait(__builtin_LINE(), {place}, {ops[2]});"


def _instruction(opcode: str, parts: list[str], ops: list[str]) -> str | None:
    """One instruction as C++, from its opcode, the opcode's parts, and its operands; None if it is not emulated."""
    if parts[0] in ("ld", "st", "atom", "red") and parts[1] != "async":
        return _access(opcode, parts, ops)
    for rule in (_warp, _matrix, _barrier, _copy, _register, _arithmetic):
        if (code := rule(opcode, parts, ops)) is not None:
            return code
    return None


def _access(opcode: str, parts: list[str], ops: list[str]) -> str | None:
    """Loads, stores and atomics as C++; None for others."""
    family, kind = parts[0], TYPES.get(parts[-1])
    strong = str(bool(STRONG & set(parts))).lower()
    if kind is None or "cluster" in opcode or "bulk" in parts or "async" in parts:
        return None
    if family in ("ld", "st"):
        width = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
        place, values = (ops[1], _lanes(ops[0])) if family == "ld" else (ops[0], _lanes(ops[1]))
        address, offset = _address(place).split(", ")
        code = f"cuda_on_cpu::ptx::check_alignment({address}, {offset}, {width} * sizeof({kind}));"
        for i, value in enumerate(values):
            at = f"{address}, {offset} + {i} * int(sizeof({kind})), {strong}"
            code += (
                _set(value, f"cuda_on_cpu::ptx::load<{kind}>({at})") if family == "ld"
                else f"cuda_on_cpu::ptx::store<{kind}>({at}, {value});"
            )  # fmt: skip
        return code
    destination, (place, *values) = (ops[0], ops[1:]) if family == "atom" else ("_", ops)
    at = f"cuda_on_cpu::ptx::at<{kind}>({_address(place)})"
    values = [f"cuda_on_cpu::ptx::as<{kind}>({v})" for v in values]
    if "cas" in parts:
        call = f"atomicCAS({at}, {values[0]}, {values[1]})"
    elif "noftz" in parts or any(re.fullmatch(r"v\d", p) for p in parts):
        return None
    else:
        name = next((ATOMICS[p] for p in parts if p in ATOMICS), None)
        if name is None:
            return None
        call = f"atomic{name}({at}, {values[0]})"
    return f"{call};" if destination == "_" else _set(destination, call)


def _warp(opcode: str, parts: list[str], ops: list[str]) -> str | None:
    """Collective operations of a warp as C++; None for others."""
    kind = TYPES.get(parts[-1])
    if re.fullmatch(r"shfl\.sync\.(up|down|bfly|idx)\.b32", opcode):
        d, _, p = ops[0].partition("|")
        flag = f"bool in_range; uint32_t got = cuda_on_cpu::ptx::shuffle(\"{parts[2]}\", " \
               f"cuda_on_cpu::ptx::as<uint32_t>({ops[1]}), {ops[2]}, {ops[3]}, {ops[4]}, " \
               f"&in_range, __builtin_LINE());"  # fmt: skip
        return f"{{ {flag} {_set(d, 'got')} {f'{p} = in_range;' if p else ''} }}"
    if opcode == "vote.sync.ballot.b32":
        return _set(ops[0], f"__ballot_sync({ops[2]}, {ops[1]})")
    if opcode in ("vote.sync.any.pred", "vote.sync.all.pred"):
        return f"{ops[0]} = __{parts[2]}_sync({ops[2]}, {ops[1]});"
    if re.fullmatch(r"match\.any\.sync\.b(32|64)", opcode):
        return _set(ops[0], f"__match_any_sync({ops[2]}, {ops[1]})")
    if re.fullmatch(r"redux\.sync\.(add|min|max|and|or|xor)\.\w32", opcode) and kind != "float":
        value = f"cuda_on_cpu::ptx::as<{kind}>({ops[1]})"
        return _set(ops[0], f"__reduce_{parts[2]}_sync({ops[2]}, {value})")
    if opcode == "elect.sync":
        d, _, p = ops[0].partition("|")
        first = f"__builtin_ctz(__ballot_sync({ops[1]}, 1))"
        return f"{{ unsigned first = {first}; {p} = cuda_on_cpu::self().lane == first; {_set(d, 'first')} }}"
    return None


VALUES = {"f16": "cuda_on_cpu::half_value", "bf16": "cuda_on_cpu::bfloat16_value"}


def _product(call: str, results: list[str], sums: list[str], **operands: list[str]) -> str:
    """A product of operands in registers that is added to `sums`, as C++."""
    code = "".join(f"uint32_t {name}[] = {{{', '.join(words)}}}; " for name, words in operands.items())
    code += f"float sums[] = {{{', '.join(sums)}}}; cuda_on_cpu::ptx::{call}; "
    return "{ " + code + " ".join(_set(lane, f"sums[{i}]") for i, lane in enumerate(results)) + " }"


def _matrix(opcode: str, parts: list[str], ops: list[str]) -> str | None:
    """Instructions of tensor cores, and those that load matrices for them, as C++; None for others."""
    if matrix := re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16)\.\1\.f32", opcode):
        d, a, b, c = map(_lanes, ops)
        call = f"mma({VALUES[matrix.group(1)]}, of_a, of_b, sums, __builtin_LINE())"
        return _product(call, d, c, of_a=a, of_b=b)
    if opcode == "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32":
        d, a, b, c = map(_lanes, ops)
        return _product("mma_tf32(of_a, of_b, sums, __builtin_LINE())", d, c, of_a=a, of_b=b)
    if matrix := re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k8\.f32\.tf32\.tf32", opcode):
        d, (descriptor, added) = _lanes(ops[0]), ops[2:4]
        if ops[1].startswith("{") or ops[4:] != ["1", "1"]:
            return None
        operands = f"uint64_t({ops[1]}), {descriptor}, {added}, sums, false, false"
        return _product(f"wgmma<{matrix.group(1)}>(cuda_on_cpu::ptx::tf32_value, {operands})", d, d)
    if matrix := re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(f16|bf16)\.\2", opcode):
        d, (descriptor, added), value = _lanes(ops[0]), ops[2:4], VALUES[matrix.group(2)]
        if not ops[1].startswith("{") and ops[4:6] == ["1", "1"]:
            operands = f"uint64_t({ops[1]}), {descriptor}, {added}, sums, {', '.join(ops[6:])}"
            return _product(f"wgmma<{matrix.group(1)}>({value}, {operands})", d, d)
        if not ops[1].startswith("{") or ops[4:] != ["1", "1", "0"]:
            return None
        call = f"wgmma<{matrix.group(1)}>({value}, of_a, {descriptor}, {added}, sums, __builtin_LINE())"
        return _product(call, d, d, of_a=_lanes(ops[1]))
    if load := re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", opcode):
        count, trans = int(load.group(1)), str(bool(load.group(2))).lower()
        call = f"cuda_on_cpu::ptx::load_matrices({_address(ops[1])}, {count}, {trans}, got, __builtin_LINE());"
        lanes = " ".join(_set(lane, f"got[{i}]") for i, lane in enumerate(_lanes(ops[0])))
        return "{ uint32_t got[4]; " + call + lanes + " }"
    return None


def _barrier(opcode: str, parts: list[str], ops: list[str]) -> str | None:
    """Barriers, mbarriers, and instructions that order kernels and memory, as C++; None for others."""
    if opcode == "bar.warp.sync":
        return f"__syncwarp({ops[0]});"
    if barrier := re.fullmatch(r"(bar|barrier)(\.cta)?\.(sync|arrive)(\.aligned)?", opcode):
        threads, wait = (ops[1] if len(ops) > 1 else "0"), str(barrier.group(3) == "sync").lower()
        return (f'cuda_on_cpu::block_barrier("bar.{barrier.group(3)}", __builtin_LINE(), {ops[0]}, '
                f"{threads}, false, {wait});")  # fmt: skip
    if re.fullmatch(r"barrier\.cluster\.(arrive(?:\.release|\.relaxed)?|wait(?:\.acquire)?)(?:\.aligned)?", opcode):
        return f"cuda_on_cpu::cluster_{parts[2]}(__builtin_LINE());"
    if barrier := re.fullmatch(r"(bar|barrier)(?:\.cta)?\.red\.(popc|and|or)(?:\.aligned)?\.(u32|pred)", opcode):
        threads, p = (ops[2], ops[3]) if len(ops) == 4 else ("0", ops[2])
        negate, compare = {"popc": ("", ""), "and": ("!", " == 0"), "or": ("", " > 0")}[barrier.group(2)]
        call = (f'cuda_on_cpu::block_barrier("bar.red", __builtin_LINE(), {ops[1]}, {threads}, '
                f"{negate}({p}))")  # fmt: skip
        return f"{ops[0]} = {call}{compare};"
    if barrier := MBARRIER.fullmatch(opcode):
        return _mbarrier(barrier.group(1), barrier.group(5) == "::cluster", ops)
    if opcode == "griddepcontrol.wait":
        return "cuda_on_cpu::await_previous();"
    if opcode == "griddepcontrol.launch_dependents":
        return "cuda_on_cpu::launch_dependents();"
    if NO_EFFECT.fullmatch(opcode):
        return "cuda_on_cpu::yield_point();"
    return None


def _copy(opcode: str, parts: list[str], ops: list[str]) -> str | None:
    """Asynchronous copies and stores, and prefetches, as C++; None for others."""
    if opcode in ("cp.async.ca.shared.global", "cp.async.cg.shared.global") or re.fullmatch(
        r"cp\.async\.c[ag]\.shared\.global\.L2::(\d+B|cache_hint)", opcode
    ):
        sizes = ops[2:-1] if opcode.endswith("cache_hint") else ops[2:]
        filled = sizes[-1]
        return (f"cuda_on_cpu::ptx::copy_async({_address(ops[0])}, (const void*)"
                f"{_address(ops[1])}, {ops[2]}, {filled});")  # fmt: skip
    if opcode == "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes":
        to, barrier_there = (f"cuda_on_cpu::ptx::in_cluster({_address(ops[i])})" for i in (0, 3))
        source = f"cuda_on_cpu::ptx::in_block({_address(ops[1])})"
        return f"cuda_on_cpu::bulk_copy({to}, {source}, {ops[2]}, {barrier_there});"
    if re.fullmatch(
        r"cp\.async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?", opcode
    ):
        to, source, barrier_there = (f"cuda_on_cpu::ptx::in_block({_address(ops[i])})" for i in (0, 1, 3))
        return f"cuda_on_cpu::bulk_copy({to}, {source}, {ops[2]}, {barrier_there});"
    if box := re.fullmatch(
        r"cp\.async\.bulk\.tensor\.2d\.shared::cluster\.global(\.tile)?\.mbarrier::complete_tx::bytes"
        r"(\.multicast::cluster)?",
        opcode,
    ):
        matrix, column, row = _matched(r"\[(\S+?), \{(\S+?), (\S+?)\}\]", ops[1]).groups()
        ranks = ops[3] if box.group(2) else "1u << cuda_on_cpu::self().block->rank"
        places = f"{_address(ops[0]).split(',')[0]}, {_address(ops[2]).split(',')[0]}"
        return f"cuda_on_cpu::ptx::copy_box({matrix}, {column}, {row}, {places}, {ranks});"
    if re.fullmatch(r"st\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes\.[bus](32|64)", opcode):
        to, barrier_there = (f"cuda_on_cpu::ptx::in_cluster({_address(ops[i])})" for i in (0, 2))
        kind = TYPES[parts[-1]]
        return (f"{{ {kind} sent = cuda_on_cpu::ptx::as<{kind}>({ops[1]}); "
                f"cuda_on_cpu::store_async({to}, &sent, sizeof sent, {barrier_there}); }}")  # fmt: skip
    if re.fullmatch(r"cp\.async\.bulk\.prefetch\.L2\.global(\.L2::cache_hint)?", opcode):
        # Only a hint, but its address is checked.
        return f"cuda_on_cpu::bulk_prefetch(cuda_on_cpu::ptx::in_block({_address(ops[0])}), {ops[1]});"
    if opcode in ("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all"):
        return f"cuda_on_cpu::ptx::{parts[2]}({', '.join(ops)});"
    if opcode == "prefetch.tensormap":
        return ";"
    if re.fullmatch(r"prefetchu?(\.global)?\.L[12]", opcode):
        # Only a hint, but its address is checked.
        return f"cuda_on_cpu::ptx::check_place({_address(ops[0])});"
    return None


def _register(opcode: str, parts: list[str], ops: list[str]) -> str | None:
    """Instructions that move, select and convert registers, or stop a thread, as C++; None for others."""
    if opcode == "mov." + parts[-1] and ops[1].startswith("%"):
        register = ops[1][1:]
        name, _, axis = register.partition(".")
        if name not in SPECIAL:
            raise NotImplementedError(f"PTX register %{register} is not emulated")
        return _set(ops[0], SPECIAL[name] + (f".{axis}" if axis else ""))
    if opcode == "setp.ne.b32":
        return f"{ops[0]} = ({ops[1]}) != ({ops[2]});"
    if opcode == "setp.eq.u32":
        return f"{ops[0]} = ({ops[1]}) == ({ops[2]});"
    if opcode in ("selp.b32", "selp.u32"):
        return _set(ops[0], f"uint32_t({ops[3]} ? {ops[1]} : {ops[2]})")
    if parts[0] == "nanosleep":
        return f"__nanosleep({ops[0]});"
    if opcode == "trap":
        return "__trap();"
    if opcode in BITS:
        return _set(ops[0], BITS[opcode].format(*ops[1:]))
    if opcode == "mapa.shared::cluster.u32":
        return _set(ops[0], f"cuda_on_cpu::ptx::map_shared_address({ops[1]}, {ops[2]})")
    return None


def _arithmetic(opcode: str, parts: list[str], ops: list[str]) -> str | None:
    """Arithmetic on numbers, from `ARITHMETIC`, as C++; None for others."""
    family, kind = parts[0], TYPES.get(parts[-1])
    modifiers = {"rn", "ftz", "approx", "full", parts[-1]}
    name = ".".join([family, *(p for p in parts[1:] if p not in modifiers)])
    if name in ARITHMETIC and kind in ("float", "int32_t", "uint32_t", "int64_t", "uint64_t"):
        if kind != "float" and family in ("fma", "ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh"):
            return None
        typed = [f"cuda_on_cpu::ptx::as<{kind}>({o})" for o in ops[1:]]
        value = f"{kind}({ARITHMETIC[name].format(*typed)})"
        if kind == "float" and family in ("add", "sub", "mul", "fma", "ex2"):
            value = f"cuda_on_cpu::ptx::canonical({value})"
        return _set(ops[0], value)
    return None
